// The conversation. What a model writes goes into text nodes, never into HTML.

import { ApiError, events, request } from "./api.js";

const byId = (id) => document.getElementById(id);
const NEAR_END = 60; // pixels: whoever has scrolled up further is not pulled down

export class Chat {
  #history = [];
  #running = null; // AbortController of the answer that comes
  #onRefusedKey;

  // `onRefusedKey` is called when the server wants another API key.
  constructor(onRefusedKey) {
    this.#onRefusedKey = onRefusedKey;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("reset").addEventListener("click", () => this.#reset());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#running?.abort();
    });
  }

  #reset() {
    this.#running?.abort();
    this.#history = [];
    byId("messages").replaceChildren(byId("messages").firstElementChild);
    byId("greeting").hidden = false;
    byId("prompt").focus();
  }

  async #send() {
    const prompt = byId("prompt").value.trim();
    if (this.#running || !prompt || !settingsAreValid()) return;
    byId("prompt").value = "";
    byId("greeting").hidden = true;
    const question = addMessage("user");
    question.text.data = prompt;
    const history = this.#history;
    history.push({ role: "user", content: prompt });
    const answer = addMessage("assistant");
    this.#begin(answer);
    try {
      await this.#answer(answer, history);
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.fail(error.message);
        if (error instanceof ApiError && error.status === 401) this.#onRefusedKey();
      } else {
        answer.note("stopped");
      }
    } finally {
      this.#end(answer, history);
    }
  }

  #begin(answer) {
    this.#running = new AbortController();
    answer.element.setAttribute("aria-busy", "true");
    byId("send").hidden = true;
    byId("stop").hidden = false;
  }

  #end(answer, history) {
    this.#running = null;
    answer.element.removeAttribute("aria-busy");
    byId("send").hidden = false;
    byId("stop").hidden = true;
    if (answer.text.data) {
      history.push({ role: "assistant", content: answer.text.data });
    } else {
      history.pop(); // the question can be asked again
    }
  }

  async #answer(answer, history) {
    const began = performance.now();
    const response = await request("v1/chat/completions", {
      body: { messages: withSystem(history), stream: true, stream_options: { include_usage: true }, ...settings() },
      signal: this.#running.signal,
    });
    let first = 0, usage, finish;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      if (choice?.delta?.content) {
        first ||= performance.now();
        answer.add(choice.delta.content);
      }
    }
    if (usage) answer.note(figures(usage.completion_tokens, began, first, finish));
  }
}

function figures(tokens, began, first, finish) {
  const seconds = (performance.now() - first) / 1000;
  const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (first && tokens > 1) parts.push(`${((tokens - 1) / seconds).toFixed(1)}/s`);
  if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  if (finish === "length") parts.push("cut off at max tokens");
  return parts.join(" · ");
}

function withSystem(history) {
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }, ...history] : history;
}

function settings() {
  const number = (id) => (byId(id).value === "" ? undefined : byId(id).valueAsNumber);
  return {
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}

// Opens the settings at the first field that holds no valid number.
function settingsAreValid() {
  const bad = document.querySelector(".settings :invalid");
  if (!bad) return true;
  bad.closest("details").open = true;
  bad.reportValidity();
  return false;
}

function addMessage(role) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const body = element.appendChild(document.createElement("p"));
  const text = body.appendChild(document.createTextNode(""));
  const list = byId("messages");
  list.append(element);
  list.scrollTop = list.scrollHeight;
  const line = (kind, words) => {
    const note = element.appendChild(document.createElement("footer"));
    note.className = kind;
    note.textContent = words;
  };
  const following = (change) => {
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
    change();
    if (follows) list.scrollTop = list.scrollHeight;
  };
  return {
    element,
    text,
    add: (piece) => following(() => text.appendData(piece)),
    note: (words) => following(() => line("note", words)),
    fail: (words) => following(() => line("error", words)),
  };
}

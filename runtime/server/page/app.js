// Puts the page together: the conversation, the engine, and the API key if the server asks for one.

import { request, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";

const byId = (id) => document.getElementById(id);

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

async function showModel() {
  const models = await (await request("v1/models")).json();
  byId("model").textContent = models.data[0].id;
  document.title = `${models.data[0].id} · pagec`;
}

new Chat(askForKey);
const engine = new EngineView(askForKey);

function begin() {
  engine.follow();
  showModel().catch(() => {}); // the engine's state says what is wrong
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("prompt").focus();
  begin();
});
begin();

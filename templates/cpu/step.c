/* Runs lists of kernels on a team of threads.

   A kernel is dealt out in shares (share, num_shares), some for each worker; who has done his own takes what
   another has not begun, for cores are not equally fast, least of all where others use them too. A barrier
   stands between two kernels. Calling the team together costs microseconds and a model has hundreds of
   kernels, so that is done once a step. The caller is worker 0. Kernels are TVM's packed functions:
   int f(self, args, num_args, result), 0 if all is well. Their arguments are arrays first, then three
   integers: rows, share, shares. What else they would need of TVM's runtime, a place for error messages, is
   at the end of this file. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; elsewhere an error, and pages come when they are touched */
#endif

typedef struct { /* TVMFFIAny */
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    void *pointer;
  } value;
} Any;

typedef int (*Kernel)(void *self, const Any *args, int32_t num_args, Any *result);

typedef struct {
  int64_t max_rows;
  Kernel run;     /* NULL: for so few rows there is nothing to do */
  int64_t shares; /* for each worker; neighbours lie side by side, so they are one worker's */
} Variant;

typedef struct {
  const Any *arrays;
  const Variant *variants; /* ascending; the last takes any number of rows */
  int32_t num_arrays;
  int32_t rows; /* which of the step's row counts this kernel takes */
} Launch;

typedef struct {
  const Launch *launches;
  const int32_t *rows;
  int64_t *times_ns; /* NULL, or when each launch began, and the end */
  char *message;     /* of the failed launch */
  int num_launches;
  atomic_int failed; /* 1 + the number of a launch that failed */
} Step;

typedef struct Team Team;

typedef struct {
  Team *team;
  pthread_t thread;
  int worker;
} Member;

typedef struct {
  _Alignas(64) atomic_int begun; /* of a worker's shares of the current kernel, by whomever */
} Pile;

/* Memory of equal parts, each used from its beginning on. Whoever touches a page first waits until it is there,
   which takes a fraction of a millisecond for a huge one and several on a virtual machine: members who have
   nothing else to do see to it before. Under the mutex `sleep`. */
typedef struct {
  char *memory;
  int64_t part_bytes;
  int64_t num_parts;
  int64_t wanted; /* pages that shall be there, the first of every part, then the second of every part, ... */
  int64_t begun;  /* so many are, or soon will be */
} Ahead;

struct Team {
  Step *step;      /* what is worked on */
  Member *members; /* all but worker 0 */
  Pile *piles;
  int num_workers;
  pid_t process;        /* threads do not survive a fork */
  pthread_mutex_t turn; /* one step at a time */
  pthread_mutex_t sleep;
  pthread_cond_t wake;
  _Alignas(64) atomic_int posted; /* steps so far; one more is the sign to begin */
  atomic_int sleepers;
  _Alignas(64) atomic_int arrived; /* workers at the barrier */
  _Alignas(64) atomic_int round;   /* barriers that all have reached */
  Ahead ahead;
};

enum {
  TYPE_INTEGER = 1,
  MAX_ARGS = 64,
  MAX_MESSAGE = 512,     /* see runtime/device/cpu.py */
  SPINS = 512,           /* some ten microseconds: few waits are longer, and who is waited for may need the core */
  STACK_BYTES = 8 << 20, /* kernels keep their scratch arrays there */
  PAGE_BYTES = 4096      /* the smallest; of a huge page the first touch brings all */
};

/* Who waits longer than is usual sleeps, and leaves the core to whom he may be waiting for: for the other
   workers at a barrier, and for the host of a busy engine between two steps. */
static const int64_t BARRIER_AWAKE_NS = 100000;
static const int64_t STEP_AWAKE_NS = 2000000;

static _Thread_local char message[MAX_MESSAGE];

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* While a word is `value`: spins, then yields for `awake_ns`. Whether it changed. */
static int changes_soon(atomic_int *word, int value, int64_t awake_ns) {
  for (int spins = 0; spins < SPINS; spins++) {
    if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
    pause_briefly();
  }
  for (const int64_t began = now_ns(); now_ns() - began < awake_ns;) {
    if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
    sched_yield();
  }
  return 0;
}

/* Sleeps while a word is `value` and, for who `touches`, all pages are there that shall be. */
static void sleep_while(Team *team, atomic_int *word, int value, int touches) {
  /* Either who changes the word sees a sleeper, or the sleeper sees the change: both write first, then read. */
  pthread_mutex_lock(&team->sleep);
  atomic_fetch_add(&team->sleepers, 1);
  while (atomic_load(word) == value && !(touches && team->ahead.begun < team->ahead.wanted))
    pthread_cond_wait(&team->wake, &team->sleep);
  atomic_fetch_sub(&team->sleepers, 1);
  pthread_mutex_unlock(&team->sleep);
}

/* Adds 1 to a word that others wait for. */
static void advance(Team *team, atomic_int *word) {
  atomic_fetch_add(word, 1);
  if (!atomic_load(&team->sleepers)) return;
  pthread_mutex_lock(&team->sleep);
  pthread_cond_broadcast(&team->wake);
  pthread_mutex_unlock(&team->sleep);
}

/* The next page that shall be there; NULL if none is missing. */
static char *next_page(Team *team) {
  Ahead *ahead = &team->ahead;
  char *page = NULL;
  pthread_mutex_lock(&team->sleep);
  if (ahead->begun < ahead->wanted) {
    const int64_t part = ahead->begun % ahead->num_parts, number = ahead->begun / ahead->num_parts;
    page = ahead->memory + part * ahead->part_bytes + number * PAGE_BYTES;
    page -= (uintptr_t)page % PAGE_BYTES;
    ahead->begun++;
  }
  pthread_mutex_unlock(&team->sleep);
  return page;
}

/* Pages, one after the other, until the next step is posted. */
static void touch_ahead(Team *team, int seen) {
  while (atomic_load_explicit(&team->posted, memory_order_acquire) == seen) {
    char *page = next_page(team);
    if (!page) return;
    /* Writes nothing, so it disturbs nobody, and of memory that is no more it says so. */
    if (madvise(page, PAGE_BYTES, MADV_POPULATE_WRITE)) {
      pthread_mutex_lock(&team->sleep);
      team->ahead.begun = team->ahead.wanted;
      pthread_mutex_unlock(&team->sleep);
    }
  }
}

/* Waits until all workers are here. The last to arrive opens the next round, in which no share has begun. */
static void barrier(Team *team) {
  if (team->num_workers == 1) return;
  const int round = atomic_load_explicit(&team->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->num_workers - 1) {
    atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
    for (int i = 0; i < team->num_workers; i++)
      atomic_store_explicit(&team->piles[i].begun, 0, memory_order_relaxed);
    advance(team, &team->round);
  } else {
    if (!changes_soon(&team->round, round, BARRIER_AWAKE_NS)) sleep_while(team, &team->round, round, 0);
  }
}

/* The kernel for so many rows; NULL where there is nothing to do, and so nothing to wait for. */
static const Variant *find_variant(const Launch *launch, int64_t rows) {
  if (rows == 0) return NULL;
  const Variant *variant = launch->variants;
  while (rows > variant->max_rows) variant++;
  return variant->run ? variant : NULL;
}

/* The worker's own shares, then others'; whether one has failed. */
static int run_shares(Team *team, const Launch *launch, const Variant *variant, int64_t rows, int worker) {
  Any args[MAX_ARGS];
  const Kernel run = variant->run;
  const int n = launch->num_arrays;
  /* Of few rows there is so little to do that looking for more takes longer. */
  const int shares = team->num_workers == 1 ? 1 : 2 * rows < variant->shares ? 2 * rows : variant->shares;
  memcpy(args, launch->arrays, n * sizeof(Any));
  const int64_t integers[3] = {rows, worker, (int64_t)shares * team->num_workers};
  for (int i = 0; i < 3; i++) {
    args[n + i].type = TYPE_INTEGER;
    args[n + i].padding = 0;
    args[n + i].value.integer = integers[i];
  }
  Any result = {0};
  if (shares == 1) return run(NULL, args, n + 3, &result);
  for (int i = 0; i < team->num_workers; i++) {
    const int whose = (worker + i) % team->num_workers;
    for (;;) {
      const int share = atomic_fetch_add_explicit(&team->piles[whose].begun, 1, memory_order_relaxed);
      if (share >= shares) break;
      args[n + 1].value.integer = (int64_t)whose * shares + share;
      if (run(NULL, args, n + 3, &result)) return 1;
    }
  }
  return 0;
}

static void work(Team *team, int worker) {
  Step *step = team->step;
  for (int i = 0; i < step->num_launches; i++) {
    const Launch *launch = &step->launches[i];
    const int64_t rows = step->rows[launch->rows];
    if (step->times_ns && worker == 0) step->times_ns[i] = now_ns();
    const Variant *variant = find_variant(launch, rows);
    if (!variant) continue;
    int none = 0;
    message[0] = 0;
    if (run_shares(team, launch, variant, rows, worker) &&
        atomic_compare_exchange_strong(&step->failed, &none, i + 1))
      memcpy(step->message, message, MAX_MESSAGE);
    barrier(team);
    /* All workers leave after the same launch, or one would wait for ever: a later failure is not ours yet. */
    int failed = atomic_load_explicit(&step->failed, memory_order_relaxed);
    if (failed && failed <= i + 1) break;
  }
  if (step->times_ns && worker == 0) step->times_ns[step->num_launches] = now_ns();
  barrier(team); /* The step lies on worker 0's stack: when he leaves, nobody may still look at it. */
}

static void *follow(void *data) {
  const Member *member = data;
  Team *team = member->team;
  for (int seen = 0;; seen++) {
    while (!changes_soon(&team->posted, seen, STEP_AWAKE_NS)) {
      touch_ahead(team, seen);
      sleep_while(team, &team->posted, seen, 1);
    }
    if (!team->step) return NULL;
    work(team, member->worker);
  }
}

void pagec_team_free(Team *team) {
  if (team->process == getpid()) {
    team->step = NULL;
    advance(team, &team->posted);
    for (int i = 0; i < team->num_workers - 1; i++) pthread_join(team->members[i].thread, NULL);
  }
  free(team->members);
  free(team->piles);
  free(team);
}

/* A team of the caller and num_workers - 1 threads; NULL if they cannot be had. */
Team *pagec_team_new(int32_t num_workers) {
  Team *team = aligned_alloc(64, sizeof(Team));
  Member *members = calloc(num_workers, sizeof(Member));
  Pile *piles = aligned_alloc(64, num_workers * sizeof(Pile));
  pthread_attr_t attributes;
  if (!team || !members || !piles || pthread_attr_init(&attributes)) {
    free(team);
    free(members);
    free(piles);
    return NULL;
  }
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  memset(team, 0, sizeof(Team));
  memset(piles, 0, num_workers * sizeof(Pile));
  team->members = members;
  team->piles = piles;
  team->process = getpid();
  pthread_mutex_init(&team->turn, NULL);
  pthread_mutex_init(&team->sleep, NULL);
  pthread_cond_init(&team->wake, NULL);
  int failed = 0, worker = 1;
  for (; worker < num_workers; worker++) {
    Member *member = &members[worker - 1];
    member->team = team;
    member->worker = worker;
    failed = pthread_create(&member->thread, &attributes, follow, member);
    if (failed) break;
  }
  team->num_workers = worker;
  pthread_attr_destroy(&attributes);
  if (!failed) return team;
  pagec_team_free(team);
  return NULL;
}

/* 0; 1 + the number of the launch that failed, whose `error` [MAX_MESSAGE] says why; or -1 in a process that
   the team is not of. */
int pagec_run(Team *team, const Launch *launches, int32_t num_launches, const int32_t *rows, int64_t *times_ns,
              char *error) {
  if (team->process != getpid()) return -1;
  pthread_mutex_lock(&team->turn);
  Step step = {
      .launches = launches, .rows = rows, .times_ns = times_ns, .message = error, .num_launches = num_launches};
  team->step = &step;
  advance(team, &team->posted);
  work(team, 0);
  pthread_mutex_unlock(&team->turn);
  return atomic_load(&step.failed);
}

/* Members who have nothing to do make the first `wanted_bytes` of every part of some memory ready. Only for one
   memory at a time; it must live as long as the team, or until this is called for another. */
void pagec_touch_ahead(Team *team, char *memory, int64_t part_bytes, int64_t num_parts, int64_t wanted_bytes) {
  Ahead *ahead = &team->ahead;
  if (team->process != getpid()) return;
  pthread_mutex_lock(&team->sleep);
  if (ahead->memory != memory || ahead->part_bytes != part_bytes || ahead->num_parts != num_parts)
    *ahead = (Ahead){.memory = memory, .part_bytes = part_bytes, .num_parts = num_parts};
  if (wanted_bytes > part_bytes) wanted_bytes = part_bytes;
  ahead->wanted = (wanted_bytes + PAGE_BYTES - 1) / PAGE_BYTES * num_parts;
  pthread_cond_broadcast(&team->wake);
  pthread_mutex_unlock(&team->sleep);
}

/* Pages that are still to be made ready; 0 where nobody would do it. */
int64_t pagec_untouched(Team *team) {
  if (team->process != getpid() || team->num_workers == 1) return 0;
  pthread_mutex_lock(&team->sleep);
  const int64_t left = team->ahead.wanted - team->ahead.begun;
  pthread_mutex_unlock(&team->sleep);
  return left > 0 ? left : 0;
}

/* What kernels call before they return an error. Hidden, so that theirs is this one even where TVM is loaded. */
__attribute__((visibility("hidden"))) void TVMFFIErrorSetRaisedFromCStrParts(const char *kind,
                                                                           const char **parts,
                                                                           int32_t num_parts) {
  size_t length = snprintf(message, MAX_MESSAGE, "%s: ", kind);
  for (int i = 0; i < num_parts && length < MAX_MESSAGE; i++)
    length += snprintf(message + length, MAX_MESSAGE - length, "%s", parts[i]);
}

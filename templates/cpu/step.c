/* Runs a list of kernels as one parallel region.

   Every worker takes its share (worker, num_workers) of each kernel; a barrier stands between two kernels.
   Entering a region costs microseconds and a model has hundreds of kernels, so a step enters one region,
   not hundreds. Kernels are TVM's packed functions: int f(self, args, num_args, result), 0 if all is well.
   Their arguments are arrays first, then three integers: rows, worker, workers. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

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
  Kernel run; /* NULL: for so few rows there is nothing to do */
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
  int32_t num_launches;
  int32_t num_workers;
  _Alignas(64) atomic_int arrived;
  _Alignas(64) atomic_int round;
  _Alignas(64) atomic_int failed; /* 1 + the number of a launch that failed */
} Step;

enum { TYPE_INTEGER = 1, MAX_ARGS = 64, SPINS_BEFORE_YIELD = 4096 };

int TVMBackendParallelLaunch(int (*task)(int worker, void *group, void *data), void *data, int num_tasks);

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

/* Waits until all workers are here. The last to arrive opens the next round. */
static void barrier(Step *step) {
  if (step->num_workers == 1) return;
  int round = atomic_load_explicit(&step->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&step->arrived, 1, memory_order_acq_rel) == step->num_workers - 1) {
    atomic_store_explicit(&step->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&step->round, round + 1, memory_order_release);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&step->round, memory_order_acquire) == round; spins++) {
    if (spins < SPINS_BEFORE_YIELD)
      pause_briefly();
    else
      sched_yield(); /* more workers than free cores: let the others run */
  }
}

/* The kernel for so many rows; NULL where there is nothing to do, and so nothing to wait for. */
static Kernel find_kernel(const Launch *launch, int64_t rows) {
  if (rows == 0) return NULL;
  const Variant *variant = launch->variants;
  while (rows > variant->max_rows) variant++;
  return variant->run;
}

static int run_share(const Launch *launch, Kernel run, int64_t rows, int worker, int num_workers) {
  Any args[MAX_ARGS];
  int n = launch->num_arrays;
  memcpy(args, launch->arrays, n * sizeof(Any));
  const int64_t integers[3] = {rows, worker, num_workers};
  for (int i = 0; i < 3; i++) {
    args[n + i].type = TYPE_INTEGER;
    args[n + i].padding = 0;
    args[n + i].value.integer = integers[i];
  }
  Any result = {0};
  return run(NULL, args, n + 3, &result);
}

static int work(int worker, void *group, void *data) {
  (void)group;
  Step *step = data;
  for (int i = 0; i < step->num_launches; i++) {
    const Launch *launch = &step->launches[i];
    const int64_t rows = step->rows[launch->rows];
    if (step->times_ns && worker == 0) step->times_ns[i] = now_ns();
    const Kernel run = find_kernel(launch, rows);
    if (!run) continue;
    int none = 0;
    if (run_share(launch, run, rows, worker, step->num_workers))
      atomic_compare_exchange_strong(&step->failed, &none, i + 1);
    barrier(step);
    /* All workers leave after the same launch, or one would wait for ever: a later failure is not ours yet. */
    int failed = atomic_load_explicit(&step->failed, memory_order_relaxed);
    if (failed && failed <= i + 1) break;
  }
  if (step->times_ns && worker == 0) step->times_ns[step->num_launches] = now_ns();
  return 0;
}

/* 0, or 1 + the number of the launch that failed. */
int pagec_run(const Launch *launches, int32_t num_launches, const int32_t *rows, int32_t num_workers,
              int64_t *times_ns) {
  Step step = {.launches = launches,
               .rows = rows,
               .times_ns = times_ns,
               .num_launches = num_launches,
               .num_workers = num_workers};
  if (num_workers == 1)
    work(0, NULL, &step);
  else if (TVMBackendParallelLaunch(work, &step, num_workers))
    return -1;
  return atomic_load(&step.failed);
}

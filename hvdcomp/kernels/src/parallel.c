#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#define MOST_WORKERS 255
/* Number of polls before a thread sleeps. They take some tens of microseconds, about as long as waking a thread. */
#define LOOKS 1000

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The settings for floating-point arithmetic of this thread's processor; above all, whether denormal numbers count as
 * zero. Frameworks change these settings for some threads. */
static inline uint64_t float_mode(void) {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

static inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* Held by the thread that owns the current job. */
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;

/* The current job. `lock` guards all its variables except the two atomic counters. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_is_there = PTHREAD_COND_INITIALIZER, job_is_done = PTHREAD_COND_INITIALIZER;
static void (*job_work)(void *context, int64_t task);
static void *job_context;
static int64_t job_tasks;
static uint64_t job_mode; /* the caller's float mode, so that results do not depend on the thread */
static _Atomic int64_t next_task;
static int places; /* number of workers that may still join */
static _Atomic int taking_part;
static _Atomic uint64_t job_number;
static int workers;

static void take_tasks(void (*work)(void *context, int64_t task), void *context, int64_t tasks) {
    int64_t task;
    while ((task = atomic_fetch_add_explicit(&next_task, 1, memory_order_relaxed)) < tasks) work(context, task);
}

/* The loop of a worker. `seen` is the number of the worker's last job. */
static void *serve(void *first) {
    uint64_t seen = (uint64_t)(uintptr_t)first;
    for (;;) {
        for (int look = 0; look < LOOKS && atomic_load_explicit(&job_number, memory_order_relaxed) == seen; look++)
            pause_briefly();
        pthread_mutex_lock(&lock);
        while (atomic_load_explicit(&job_number, memory_order_relaxed) == seen)
            pthread_cond_wait(&job_is_there, &lock);
        seen = atomic_load_explicit(&job_number, memory_order_relaxed);
        if (places > 0) {
            places--;
            atomic_fetch_add(&taking_part, 1);
            void (*work)(void *context, int64_t task) = job_work;
            void *context = job_context;
            int64_t tasks = job_tasks;
            set_float_mode(job_mode);
            pthread_mutex_unlock(&lock);
            take_tasks(work, context, tasks);
            pthread_mutex_lock(&lock);
            if (atomic_fetch_sub(&taking_part, 1) == 1) pthread_cond_signal(&job_is_done);
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

#define STACK (2 << 20) /* of a worker: kernels put a task's elements on the stack; some systems give 128 KiB */

/* Starts workers until there are `wanted`. The caller must hold `lock`. Signals are handled by the other threads of the
 * process. If the system refuses to create more threads, the existing ones do the work. */
static void have_workers(int wanted) {
    if (workers >= wanted) return;
    sigset_t all, before;
    pthread_attr_t detached;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, STACK);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; workers < wanted; workers++) {
        pthread_t thread;
        void *seen = (void *)(uintptr_t)atomic_load_explicit(&job_number, memory_order_relaxed);
        if (pthread_create(&thread, &detached, serve, seen) != 0) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Fork copies only the calling thread, so the child has no workers, whatever the parent was doing. */
static void start_anew(void) {
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    in_use = lock = mutex;
    job_is_there = job_is_done = condition;
    places = workers = 0;
    atomic_store(&taking_part, 0);
}

__attribute__((constructor)) static void be_told_of_forks(void) { pthread_atfork(NULL, NULL, start_anew); }

void hvd_parallel(int32_t threads, int64_t tasks, void (*work)(void *context, int64_t task), void *context) {
    int64_t helpers = (threads < tasks ? threads : tasks) - 1;
    if (helpers > MOST_WORKERS) helpers = MOST_WORKERS;
    if (helpers <= 0 || pthread_mutex_trylock(&in_use) != 0) {
        for (int64_t task = 0; task < tasks; task++) work(context, task);
        return;
    }
    pthread_mutex_lock(&lock);
    have_workers((int)helpers);
    job_work = work;
    job_context = context;
    job_tasks = tasks;
    job_mode = float_mode();
    places = (int)helpers;
    atomic_store_explicit(&next_task, 0, memory_order_relaxed);
    atomic_fetch_add(&job_number, 1);
    pthread_cond_broadcast(&job_is_there);
    pthread_mutex_unlock(&lock);

    take_tasks(work, context, tasks);

    for (int look = 0; look < LOOKS && atomic_load_explicit(&taking_part, memory_order_relaxed) > 0; look++)
        pause_briefly();
    pthread_mutex_lock(&lock);
    places = 0; /* a worker that wakes later finds no job */
    while (atomic_load(&taking_part) > 0) pthread_cond_wait(&job_is_done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&in_use);
}

/* A pool of threads for the kernels. */
#ifndef HVD_PARALLEL_H
#define HVD_PARALLEL_H

#include "hvdcomp.h"

/* Calls work(context, task) once for each task from 0 to tasks - 1, in up to `threads` threads including this one, and
 * returns when all calls have returned. The order of tasks, and the thread of each task, are undefined; results must
 * not depend on them.
 *
 * All calls run in this thread if there is only one thread or one task, if this is called inside a task, or if another
 * thread is using the pool. Threads are created when they are first needed, and then kept. After a fork, the child
 * process creates its own threads. */
HVD_EXPORT void hvd_parallel(int32_t threads, int64_t tasks, void (*work)(void *context, int64_t task),
                             void *context);

#endif

/* A pool of threads for the kernels. */
#ifndef HVD_PARALLEL_H
#define HVD_PARALLEL_H

#include "hvdcomp.h"

/* Calls work(context, task) once for each task from 0 to tasks - 1, in up to `threads` threads, this one among them,
 * and returns when all calls have. The assignment and the order of tasks are undefined: the result must not depend
 * on them.
 *
 * With one thread or one task, inside a task, and while another thread uses the pool, it calls them in this thread.
 * Threads are made when they are first needed and kept. After fork the child makes its own. */
HVD_EXPORT void hvd_parallel(int32_t threads, int64_t tasks, void (*work)(void *context, int64_t task),
                             void *context);

#endif

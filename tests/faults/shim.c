/* Put before the C library by LD_PRELOAD: a clock that can jump, and a disk that can be slow, for one process.
 *
 * The clock is CLOCK_REALTIME, however it is asked for, and deadlines that were told by it. The monotonic clock stays.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long ahead;        /* seconds */
static volatile long long nanoseconds;  /* that a write takes longer */

void faults_set_clock(long long seconds) { ahead = seconds; }
void faults_slow_disk(long long longer) { nanoseconds = longer; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec by_kernel = *until;
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (until->tv_sec > 1000000000) by_kernel.tv_sec -= ahead; /* else it is of the monotonic clock, from the start */
    return real(condition, mutex, &by_kernel);
}

ssize_t write(int handle, const void *bytes, size_t count) {
    struct stat facts;
    if (nanoseconds && !fstat(handle, &facts) && S_ISREG(facts.st_mode)) {
        struct timespec pause = {nanoseconds / 1000000000, nanoseconds % 1000000000};
        nanosleep(&pause, NULL);
    }
    return syscall(SYS_write, handle, bytes, count);
}

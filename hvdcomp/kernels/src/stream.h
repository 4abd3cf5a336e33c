/* Copies past the caches. This is for data that is too large to stay in a cache until it is read again. It saves time
 * because a plain store first reads the cache line. */
#ifndef HVD_STREAM_H
#define HVD_STREAM_H

#include <stdint.h>
#include <string.h>

#include "bucket.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

/* If all tensors together have at least this number of bytes, their results have left a core's second-level cache
 * before they are read. */
#define HVD_LARGE (8 << 20)

static inline int hvd_is_large(const hvd_bucket *bucket) {
    int64_t elements = 0;
    for (int64_t i = 0; i < bucket->segment_count; i++) elements += bucket->segments[i].size;
    return elements * (int64_t)sizeof(float) >= HVD_LARGE;
}

/* Copies `length` floats. If `large`, it copies past the caches, and `hvd_fence` must be called before another thread
 * reads. */
static inline void hvd_copy(float *restrict to, const float *restrict from, int64_t length, int large) {
#if defined(__AVX512F__) || defined(__AVX2__)
    if (large) {
        const int64_t head = (int64_t)(-((uintptr_t)to / sizeof *to) & 15); /* floats before the next cache line */
        if (head < length) {
            memcpy(to, from, (size_t)head * sizeof *to);
            int64_t i = head;
#if defined(__AVX512F__)
            for (; i + 16 <= length; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#else
            for (; i + 8 <= length; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#endif
            memcpy(to + i, from + i, (size_t)(length - i) * sizeof *to);
            return;
        }
    }
#else
    (void)large;
#endif
    memcpy(to, from, (size_t)length * sizeof *to);
}

static inline void hvd_fence(void) {
#if defined(__AVX512F__) || defined(__AVX2__)
    _mm_sfence();
#endif
}

#endif

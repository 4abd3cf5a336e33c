/* Vectors of the instruction set's width, for loops that the compiler does not vectorize well by itself.
 *
 * Sums are computed in sixteen lanes: whatever the width, element j is added to lane j % 16, and the lanes are added in
 * a fixed order. */
#ifndef HVD_LANES_H
#define HVD_LANES_H

#include <stdint.h>
#include <string.h>

#include "stream.h"

#if defined(__AVX512F__)
#define HVD_WIDTH 16 /* number of floats in a vector */
#elif defined(__AVX2__)
#define HVD_WIDTH 8
#else
#define HVD_WIDTH 4
#endif
#define HVD_LANES 16
#define HVD_PARTS (HVD_LANES / HVD_WIDTH) /* number of vectors that hold all lanes */

#define HVD_INLINE static inline __attribute__((always_inline))

/* A vector without alignment, like the floats that it is read from. */
typedef float hvd_vector __attribute__((vector_size(4 * HVD_WIDTH), aligned(4), may_alias));

typedef int32_t hvd_bits_vector __attribute__((vector_size(4 * HVD_WIDTH)));
typedef float hvd_four __attribute__((vector_size(16)));

HVD_INLINE hvd_vector hvd_load(const float *from) { return *(const hvd_vector *)from; }

HVD_INLINE void hvd_store(float *to, hvd_vector vector) { *(hvd_vector *)to = vector; }

/* Stores a vector past the caches. The address must be a multiple of a vector's bytes. Call `hvd_fence` afterwards. */
HVD_INLINE void hvd_stream(float *to, hvd_vector vector) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)vector);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)vector);
#else
    hvd_store(to, vector);
#endif
}

HVD_INLINE hvd_vector hvd_all(float value) { return value - (hvd_vector){0}; }

HVD_INLINE float hvd_sum(const hvd_vector lanes[HVD_PARTS]) {
    hvd_four fours[HVD_LANES / 4];
    memcpy(fours, lanes, sizeof fours);
    const hvd_four sums = (fours[0] + fours[2]) + (fours[1] + fours[3]);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

#endif

/* Functions that the kernels of all quantizers share. */
#ifndef HVDCOMP_QUANT_H
#define HVDCOMP_QUANT_H

#include "bucket.h"
#include "isa.h"
#include "lanes.h"
#include "packing.h"
#include "randomness.h"
#include "stream.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* A scale up to this number counts as zero, as in hvdcomp/kernels/limits.py. */
#define HVD_SMALLEST_SCALE 0x1p-96f

/* Scales of elements, as in hvdcomp/kernels/limits.py. */
#define HVD_MOST_HALVINGS 7
#define HVD_SQUARES_KEPT 0.9f
#define HVD_SQUARES_ADDED 0.1f
#define HVD_LARGEST_SQUARED 1e15f

/* `most` / scale, computed from the scale's reciprocal and rounded to a float; 0 if the scale is zero. The reciprocal
 * of a scale above 2**126 is denormal, and the processor may treat denormal numbers as zero. */
static inline float hvd_factor(float scale, float most) {
    if (!(scale > 0x1p126f)) return scale > HVD_SMALLEST_SCALE ? 1 / scale * most : 0;
    const double last = 0x1.8p-97; /* adding it as a double rounds to multiples of 2**-149, as in denormal floats */
    return (float)((1 / (double)scale + last - last) * (double)most);
}

/* The sum of the lanes, in the order of `row_dots` in hvdcomp/arrays/numpy_arrays.py. Overwrites `lanes`. */
HVD_INLINE double hvd_sum_of_lanes(double lanes[HVD_LANES]) {
    for (int half = HVD_LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Squares of floats are exact in double precision, so a fused operation gives the same result. */
static inline double hvd_sum_of_squares(const float *x, int64_t length) {
    double lanes[HVD_LANES] = {0};
    int64_t i = 0;
#if defined __AVX512F__
    __m512d low = _mm512_setzero_pd(), high = low;
    for (; i + 16 <= length; i += 16) {
        const __m512d first = _mm512_cvtps_pd(_mm256_loadu_ps(x + i));
        const __m512d second = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8));
        low = _mm512_fmadd_pd(first, first, low);
        high = _mm512_fmadd_pd(second, second, high);
    }
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
#elif defined __AVX2__
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    for (; i + 16 <= length; i += 16)
        for (int k = 0; k < 4; k++) {
            const __m256d part = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * k));
            sums[k] = _mm256_fmadd_pd(part, part, sums[k]);
        }
    for (int k = 0; k < 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums[k]);
#else
    for (; i + 16 <= length; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
#endif
    for (int lane = 0; i < length; i++, lane++) lanes[lane] += (double)x[i] * (double)x[i];
    return hvd_sum_of_lanes(lanes);
}

/* Bytes per element of the numbers that x is computed from. */
static inline int64_t hvd_width_ahead(const hvd_segment *s) {
    return s->narrow && !s->source ? sizeof(uint16_t) : sizeof(float);
}

/* The address of the numbers that are read one block later. */
static inline const char *hvd_ahead(const hvd_segment *s, int64_t start) {
    return (const char *)(s->source ? s->source : s->gradient) + (start + HVD_BLOCK) * hvd_width_ahead(s);
}

/* Prefetches a group of gradients that is read one block later, while numbers are rounded. The function is always
 * inline, because GCC removes calls of a function that only prefetches: such a function has no visible effect. */
HVD_INLINE void hvd_ask_ahead(const hvd_segment *s, int64_t start) {
    const char *next = hvd_ahead(s, start);
    const int64_t length = hvd_shorter(HVD_GROUP, s->size - start - HVD_BLOCK) * hvd_width_ahead(s);
    for (int64_t i = 0; i < length; i += 64) __builtin_prefetch(next + i);
}

#endif

/* What the kernels of all quantizers share. */
#ifndef HVDCOMP_QUANT_H
#define HVDCOMP_QUANT_H

#include "bucket.h"
#include "isa.h"
#include "randomness.h"

/* A scale that is not above this counts as zero, as in hvdcomp/compressors/quantization.py. */
#define HVD_SMALLEST_SCALE 0x1p-110f

static inline int64_t hvd_shorter(int64_t a, int64_t b) { return a < b ? a : b; }

static inline float hvd_reciprocal(float scale) { return scale > HVD_SMALLEST_SCALE ? 1 / scale : 0; }

/* exact + b, where `exact` is a product without rounding: a fused operation gives the same. */
#ifdef __FMA__
#define HVD_ADD_PRODUCT(a, factor, b) __builtin_fmaf(a, factor, b)
#define HVD_ADD_SQUARE(a, b) __builtin_fma(a, a, b)
#else
#define HVD_ADD_PRODUCT(a, factor, b) ((a) * (factor) + (b))
#define HVD_ADD_SQUARE(a, b) ((a) * (a) + (b))
#endif

/* value * factor rounded at random to one of the whole numbers beside it, between `lowest` and `highest`. NaN becomes
 * `lowest`. `more` is added before numbers are rounded down. */
static inline int32_t hvd_round(
    float value, float factor, uint32_t weyl, uint64_t key, float more, float lowest, float highest
) {
    float v = HVD_ADD_PRODUCT((float)(int32_t)(hvd_word(weyl, key) >> 8), 0x1p-24f, value * factor) + more;
    v = v > lowest ? v : lowest;
    v = v < highest ? v : highest;
    const int32_t truncated = (int32_t)v;
    return truncated - ((float)truncated > v);
}

/* x - sent; where that overflows, zero. */
static inline float hvd_left(float x, float sent) {
    const float left = x - sent;
    return (hvd_bits(left) & 0x7fffffffu) < HVD_INFINITE ? left : 0;
}

/* What was made of a tensor's elements from `start` on. */
static inline const float *hvd_made(const hvd_segment *s, int64_t start) {
    return (s->source ? s->source : s->x ? s->x : s->gradient) + start;
}

static inline double hvd_sum_of_squares(const float *restrict x, int64_t length) {
    double lanes[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= length; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] = HVD_ADD_SQUARE((double)x[i + lane], lanes[lane]);
    for (int lane = 0; i < length; i++, lane++) lanes[lane] = HVD_ADD_SQUARE((double)x[i], lanes[lane]);
    for (int lane = 0; lane < 16; lane++) sum += lanes[lane];
    return sum;
}

static inline int32_t hvd_any_found(const hvd_bucket *bucket) {
    int64_t found = 0;
    for (int64_t i = 0; i < bucket->task_count; i++) found |= bucket->tasks[i].counts[0];
    return (int32_t)found;
}

/* The end of decoding a block: the mean of a sum over `ranks`, and its largest magnitude's bits. */
static inline uint32_t hvd_mean(float *restrict sum, int64_t length, int64_t ranks, uint32_t largest) {
    if (ranks > 1) {
        const float share = (float)(1.0 / (double)ranks);
        for (int64_t i = 0; i < length; i++) sum[i] *= share;
    }
    return hvd_largest_bits(sum, length, largest);
}

#endif

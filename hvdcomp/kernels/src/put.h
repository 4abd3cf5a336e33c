/* The end of decoding: means become results. */
#ifndef HVD_PUT_H
#define HVD_PUT_H

#include "stream.h"

/* A copy of the tensor in which x, and what was sent of it, stand in the place of the kept x. */
static inline hvd_segment hvd_unsent(const hvd_segment *s) {
    hvd_segment left = *s;
    left.kept = s->x;
    left.rule = s->sent_rule;
    left.product = s->sent_product;
    left.above = s->sent_above;
    left.below = s->sent_below;
    return left;
}

/* Most cache lines of x do not change if few elements were sent. */
static inline void hvd_add_some(const float *restrict some, int64_t length, float *restrict x) {
    for (int64_t start = 0; start < length; start += 16) {
        const int64_t end = hvd_shorter(start + 16, length);
        uint32_t any = 0;
        for (int64_t i = start; i < end; i++) any |= hvd_bits(some[i]) & 0x7fffffffu;
        if (any)
            for (int64_t i = start; i < end; i++) x[i] += some[i];
    }
}

/* Writes a block of means to the results; past the caches if `large`, then to be followed by `hvd_fence`. Results of 16
 * bits are rounded; x, if it is kept, becomes its residual plus the rounding error of the means.
 *
 * mean: may be the place of float results.
 * largest: the bits of the largest magnitude so far. Returns: those, or of inf if a result is not finite. */
static inline uint32_t hvd_put(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean, int large,
    uint32_t largest
) {
    if (!s->narrow) {
        if (mean != s->result + start) hvd_copy(s->result + start, mean, length, large);
        return largest;
    }
    const hvd_segment left = hvd_unsent(s);
    const int32_t type = (int32_t)s->narrow;
    float read[HVD_WIDENED], lacks[HVD_WIDENED];
    uint16_t highest = 0;
    for (const int64_t end = start + length; start < end; start += HVD_WIDENED, mean += HVD_WIDENED) {
        const int64_t some = hvd_shorter(HVD_WIDENED, end - start);
        uint16_t *results = s->narrowed + start;
        hvd_narrow(mean, some, type, results);
        for (int64_t i = 0; i < some; i++) {
            const uint16_t magnitude = results[i] & 0x7fffu;
            highest = magnitude > highest ? magnitude : highest;
        }
        if (!b->keeps || s->sent_rule == HVD_PRODUCT) continue; /* the next step rounds the product again */
        float *x = s->x + start;
        hvd_widen(results, some, type, read);
        for (int64_t i = 0; i < some; i++) lacks[i] = mean[i] - read[i];
        if (s->sent_rule != HVD_NOTHING) {
            hvd_residual(&left, x, start, some, 1, read);
            for (int64_t i = 0; i < some; i++) x[i] = read[i] + lacks[i];
        } else
            hvd_add_some(lacks, some, x);
    }
    return highest >= (type == HVD_HALF ? 0x7c00 : 0x7f80) ? HVD_INFINITE : largest;
}

#endif

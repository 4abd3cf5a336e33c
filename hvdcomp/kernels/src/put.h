/* The end of decoding: means become results. */
#ifndef HVD_PUT_H
#define HVD_PUT_H

#include "isa.h"
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

/* `hvd_put` for results of 16 bits (`isa_make.c`). Returns whether any is not finite. */
int HVD_NAME(put_rounded)(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean
);

/* Writes a block of means to the results; past the caches if `large`, then to be followed by `hvd_fence`. Results of 16
 * bits are rounded; x, if it is kept, becomes its residual plus the rounding error of the means.
 *
 * mean: may be the place of float results.
 * largest: the bits of the largest magnitude so far. Returns: those, or of inf if a result is not finite. */
static inline uint32_t hvd_put(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean, int large,
    uint32_t largest
) {
    if (s->narrow) return HVD_NAME(put_rounded)(b, s, start, length, mean) ? HVD_INFINITE : largest;
    if (mean != s->result + start) hvd_copy(s->result + start, mean, length, large);
    return largest;
}

#endif

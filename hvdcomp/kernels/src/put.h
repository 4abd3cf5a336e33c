/* The last part of decoding: writes means to the results. */
#ifndef HVD_PUT_H
#define HVD_PUT_H

#include "isa.h"
#include "stream.h"

/* A copy of the segment in which `kept`, and the values sent from it, are replaced with x and the values sent from
 * x. */
static inline hvd_segment hvd_unsent(const hvd_segment *s) {
    hvd_segment left = *s;
    left.kept = s->x;
    left.rule = s->sent_rule;
    left.product = s->sent_product;
    left.above = s->sent_above;
    left.below = s->sent_below;
    return left;
}

/* `hvd_put` for results of 16 bits (`isa_make.c`). Returns whether any result is not finite. */
int HVD_NAME(put_rounded)(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean
);

/* Writes a block of means to the results. If `large`, it writes past the caches, and `hvd_fence` must be called
 * afterwards. Results of 16 bits are rounded; if x is kept, it then becomes its residual plus the rounding error of the
 * means.
 *
 * mean: may be the same memory as float results.
 * largest: the bits of the largest magnitude so far. Returns: the same bits, or the bits of inf if a result is not
 * finite. */
static inline uint32_t hvd_put(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean, int large,
    uint32_t largest
) {
    if (s->narrow) return HVD_NAME(put_rounded)(b, s, start, length, mean) ? HVD_INFINITE : largest;
    if (mean != s->result + start) hvd_copy(s->result + start, mean, length, large);
    return largest;
}

#endif

/* Computes x from gradients, residuals and momentum. The functions in `isa_make.c` are large, and most kernels use
 * them. They are in a file of their own so that they are compiled once for each instruction set, not once in each
 * file. */
#ifndef HVDCOMP_MAKE_H
#define HVDCOMP_MAKE_H

#include "isa.h"

#define HVD_WIDENED 1024 /* number of 16-bit elements that are widened at a time */

/* Computes a block of x: the gradient plus residual and momentum. */
void HVD_NAME(make)(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, float *restrict x
);

/* Computes the residual of a block: the part of the block `kept` that was not sent, times `decay`. */
void HVD_NAME(residual)(
    const hvd_segment *s, const float *restrict kept, int64_t start, int64_t length, float decay, float *restrict out
);

/* Converts a block of 16-bit numbers of `type` to floats. */
static inline void hvd_widened(const void *numbers, int64_t type, int64_t start, int64_t length, float *restrict out) {
    hvd_widen((const uint16_t *)numbers + start, length, (int32_t)type, out);
}

/* Computes a block of x at the place where the bucket keeps it.
 *
 * start, length: start and length of the block, which has at most HVD_BLOCK elements.
 * largest: is raised to the bits of the block's largest magnitude. The bits of inf and NaN are higher than all others.
 * Returns: the block of x, or of the source that is compressed instead.
 */
static inline const float *hvd_x(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, uint32_t *largest
) {
    const float *made = hvd_made(s, start);
    if (s->x && !s->source) HVD_NAME(make)(b, s, start, length, s->x + start);
    *largest = hvd_largest_bits(made, length, *largest);
    return made;
}

/* Whether `hvd_x_once` writes x only to its `room`. */
static inline int hvd_made_once(const hvd_bucket *b, const hvd_segment *s) {
    return s->narrow && !b->keeps && !s->source;
}

/* `hvd_x` for a block that no other function reads. If gradients have 16 bits and nothing is kept, x is in `room`. */
static inline const float *hvd_x_once(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, float *room, uint32_t *largest
) {
    if (!hvd_made_once(b, s)) return hvd_x(b, s, start, length, largest);
    HVD_NAME(make)(b, s, start, length, room);
    *largest = hvd_largest_bits(room, length, *largest);
    return room;
}

#endif

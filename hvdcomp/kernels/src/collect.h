/* Collects the elements of a vector whose magnitudes reach a bound. */
#ifndef HVD_COLLECT_H
#define HVD_COLLECT_H

#include "masks.h"
#include "sparse.h"

/* Usually only a few of 64 elements reach the bound. A fixed number of elements is always written, without a branch,
 * and `count` is the number of valid elements. A loop over the bits would be slower, because the processor could not
 * predict its end. */
#define HVD_UNASKED 4

static inline int64_t hvd_collect64(
    const float *x, uint64_t mask, int64_t first, float *restrict values, uint16_t *restrict places
) {
    const int64_t count = __builtin_popcountll(mask);
    for (int i = 0; i < HVD_UNASKED; i++) {
        const int64_t place = __builtin_ctzll(mask | 1ull << 63);
        values[i] = x[place];
        places[i] = (uint16_t)(first + place);
        mask &= mask - 1;
    }
    for (int64_t i = HVD_UNASKED; i < count; i++) {
        const int64_t place = __builtin_ctzll(mask);
        values[i] = x[place];
        places[i] = (uint16_t)(first + place);
        mask &= mask - 1;
    }
    return count;
}

/* Collects the elements whose magnitudes, as bits, reach `least`.
 *
 * first: the place of x[0]; places are below 65536.
 * values, places: receive the elements and their places. Up to HVD_SLACK elements after the last one are overwritten
 * too.
 * Returns: the number of elements. */
static inline int64_t hvd_collect(
    const float *x, int64_t length, uint32_t least, int64_t first, float *restrict values, uint16_t *restrict places
) {
    int64_t count = 0, i = 0;
    for (; i + 64 <= length; i += 64)
        count += hvd_collect64(x + i, hvd_reaching64(x + i, least), first + i, values + count, places + count);
    for (; i < length; i++) {
        values[count] = x[i];
        places[count] = (uint16_t)(first + i);
        count += hvd_magnitude(x[i]) >= least;
    }
    return count;
}

#endif

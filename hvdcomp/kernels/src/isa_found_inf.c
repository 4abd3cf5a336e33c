/* Searches for numbers that are not finite. */
#include <stdatomic.h>
#include <string.h>

#include "isa.h"

#define SLICE 65536 /* number of elements of a slice, which is one task */

struct search {
    const float *const *parts;
    const int64_t *sizes;
    int64_t count;
    _Atomic int32_t found;
};

/* Compares bits: a number whose exponent bits are all 1 is an infinity or NaN. A sum or a comparison of the floats
 * would be slower, or a compiler that may assume finite numbers could remove it. */
static int32_t any_not_finite(const float *numbers, int64_t size) {
    int32_t most = 0;
    for (int64_t i = 0; i < size; i++) {
        int32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most >= 0x7f800000;
}

/* Searches slice number `task` of all parts. */
static void search_slice(void *context, int64_t task) {
    struct search *search = context;
    if (atomic_load_explicit(&search->found, memory_order_relaxed)) return;
    for (int64_t i = 0; i < search->count; i++) {
        int64_t slices = (search->sizes[i] + SLICE - 1) / SLICE;
        if (task < slices) {
            int64_t start = task * SLICE, left = search->sizes[i] - start;
            if (any_not_finite(search->parts[i] + start, left < SLICE ? left : SLICE))
                atomic_store_explicit(&search->found, 1, memory_order_relaxed);
            return;
        }
        task -= slices;
    }
}

int32_t HVD_NAME(found_inf)(const float *const *parts, const int64_t *sizes, int64_t count, int32_t threads) {
    struct search search = {parts, sizes, count, 0};
    int64_t slices = 0;
    for (int64_t i = 0; i < count; i++) slices += (sizes[i] + SLICE - 1) / SLICE;
    hvd_parallel(threads, slices, search_slice, &search);
    return search.found;
}

/* Structures for the kernels of sparsifiers, as in `hvdcomp/kernels/tables.py`.
 *
 * Magnitudes are compared by their bits, because the bits of a larger magnitude are a larger integer.
 *
 * A payload of a bucket holds the tensors' values, the counts of blocks, and the indices. A tensor's `count` values
 * begin at byte `values`. The counts of its blocks begin at `block_counts`, which is -1 if its indices need no blocks.
 * Its indices begin at `indices` and have `index_bytes` bytes each. The tensor's tasks are its blocks. */
#ifndef HVD_SPARSE_H
#define HVD_SPARSE_H

#include "bucket.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "indices are cut to fewer bytes as on a little-endian machine"
#endif

/* How the threshold is found. */
enum {
    HVD_KTH_LARGEST, /* the k-th largest magnitude */
    HVD_BISECT,      /* between the mean and the largest magnitude */
    HVD_SAMPLED,     /* from a sample, in steps */
    HVD_FITTED       /* from the mean excess over the previous threshold, in stages */
};

/* How the sent elements of a tensor are chosen. */
typedef struct {
    int64_t first_task, tasks;
    int64_t most;     /* a threshold is good if at least `count` and at most this many elements reach it */
    int64_t need;     /* number of candidates that the search needs; at most the tensor's elements */
    int64_t sample;   /* where its sample begins; the sample has every stride-th element */
    int64_t sampled;  /* number of elements of the sample */
    int64_t reaching; /* number of sampled elements that reach the first threshold */
    int64_t stride;
    float first, later; /* in first and later stages: distance from the previous threshold, in mean excesses */
    uint32_t floor; /* bits of the magnitude that candidates reach */
    int32_t whole;  /* whether all elements are candidates */
} hvd_choice;

/* The candidates of a task, in index order: `stored` elements of the pool, from `place` on. If `stored` is -1, all
 * elements of the task are candidates. */
typedef struct {
    int64_t place, room;
    int64_t stored;
    int64_t reached; /* number of elements that reach the floor */
    double sum;      /* sum of the magnitudes of all elements */
    uint32_t largest;
    int32_t unused;
} hvd_candidates;

typedef struct {
    hvd_choice *choices;
    hvd_candidates *candidates;
    float *values;    /* the pool: the values of candidates */
    uint16_t *places; /* and the candidates' places in their tasks */
    float *sample;    /* magnitudes */
    int32_t method;
    int32_t rounds;
    int32_t type; /* type of sent values, as in half.h */
    int32_t unused;
} hvd_sparse;

#define HVD_SLACK 16 /* number of elements that may be written after the last collected element */

/* The formats of the values that chunked top-k sends. */
enum { HVD_FOUR_MEANS, HVD_IN_HALF, HVD_IN_FLOAT, HVD_IN_SIGN };

#define HVD_CHUNK_PIECE (1 << 16) /* largest number of elements of a task, and of a chunk, in chunked top-k */

static inline uint32_t hvd_magnitude(float value) { return hvd_bits(value) & 0x7fffffffu; }

/* The number of magnitudes that reach `least`. */
static inline int64_t hvd_count(const float *restrict x, int64_t length, uint32_t least) {
    int64_t count = 0;
    while (length > 0) { /* piece by piece, because narrow counters are faster */
        const int32_t piece = length < 1 << 20 ? (int32_t)length : 1 << 20;
        int32_t reached = 0;
        for (int32_t i = 0; i < piece; i++) reached += (int32_t)hvd_magnitude(x[i]) >= (int32_t)least;
        count += reached;
        x += piece;
        length -= piece;
    }
    return count;
}

#endif

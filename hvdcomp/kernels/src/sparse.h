/* Structures of the kernels of sparsifiers, as in `hvdcomp/kernels/tables.py`.
 *
 * Magnitudes are compared by their bits: those of a larger magnitude are the larger integer.
 *
 * A payload of a bucket holds the tensors' values, the counts of blocks, and the indices. A tensor's
 * `count` values begin at byte `values`, the counts of its blocks at `block_counts` (-1 if its indices need no blocks),
 * and its indices at `indices`, with `index_bytes` bytes each. Blocks are the tensor's tasks. */
#ifndef HVD_SPARSE_H
#define HVD_SPARSE_H

#include "bucket.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "indices are cut to fewer bytes as on a little-endian machine"
#endif

/* Methods of finding the threshold. */
enum {
    HVD_KTH_LARGEST, /* the k-th largest magnitude */
    HVD_BISECT,      /* between the mean and the largest magnitude */
    HVD_SAMPLED,     /* from a sample, in steps */
    HVD_FITTED       /* from the mean excess over the threshold before, in stages */
};

/* A tensor. */
typedef struct {
    int64_t first_task, tasks;
    int64_t most;     /* a threshold is good if `count` to this number of elements reach it */
    int64_t need;     /* number of candidates that suffices for the search; at most the tensor's elements */
    int64_t sample;   /* begin of its sample, every stride-th element */
    int64_t sampled;  /* elements of the sample */
    int64_t reaching; /* sampled elements that reach the first threshold */
    int64_t stride;
    float first, later; /* of the first stage, and of each later one: threshold in mean excesses over the one before */
    uint32_t floor; /* bits of the magnitude that candidates reach */
    int32_t whole;  /* whether all elements are candidates */
} hvd_choice;

/* The candidates of a task, in index order: `stored` of the pool from `place` on; all of the task's elements if
 * `stored` is -1. */
typedef struct {
    int64_t place, room;
    int64_t stored;
    int64_t reached; /* elements that reach the floor */
    double sum;      /* of the magnitudes of all elements */
    uint32_t largest;
    int32_t unused;
} hvd_candidates;

typedef struct {
    hvd_choice *choices;
    hvd_candidates *candidates;
    float *values;    /* the pool: values of candidates, */
    uint16_t *places; /* and their places in their task */
    float *sample;    /* magnitudes */
    int32_t method;
    int32_t rounds;
    int32_t type; /* of sent values, as in half.h */
    int32_t unused;
} hvd_sparse;

#define HVD_SLACK 16 /* elements that may be written behind the last one collected */

/* Forms of the values that chunked top-k sends. */
enum { HVD_FOUR_MEANS, HVD_IN_HALF, HVD_IN_FLOAT, HVD_IN_SIGN };

#define HVD_CHUNK_PIECE (1 << 16) /* elements of a task of chunked top-k at most: whole chunks, or one */

static inline uint32_t hvd_magnitude(float value) { return hvd_bits(value) & 0x7fffffffu; }

/* Number of magnitudes that reach `least`. */
static inline int64_t hvd_count(const float *restrict x, int64_t length, uint32_t least) {
    int64_t count = 0;
    while (length > 0) { /* piece by piece, because narrow counters are the faster ones */
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

/* The tensors of a bucket as kernels see them. `hvdcomp/kernels/tables.py` has the same fields in the same order. */
#ifndef HVDCOMP_BUCKET_H
#define HVDCOMP_BUCKET_H

#include "half.h"

/* The part of a kept x that was sent, and is therefore not part of the residual. */
enum {
    HVD_NOTHING,      /* the residual is x itself */
    HVD_NOT_NEGATIVE, /* `above` where x >= 0, `below` elsewhere */
    HVD_POSITIVE,     /* `above` where x > 0, `below` elsewhere */
    HVD_PRODUCT,      /* `product`, rounded to 16 bits if the gradients have 16 bits */
    HVD_EVERYTHING    /* x itself */
};

/* The product P Q', for a tensor that is viewed as a matrix. */
typedef struct {
    const float *p, *q;    /* column by column */
    int64_t rank, columns; /* the rank of P and Q; the columns of the matrix */
} hvd_product;

typedef struct {
    int64_t size;          /* elements */
    const float *gradient; /* of this step; its elements have 16 bits if `narrow` is not 0 */
    float *result;         /* receives the mean over the ranks; may be the gradient itself */
    const float *source;   /* the numbers to compress; NULL: compress x, which `hvd_x` computes */
    const float *kept;     /* x of an earlier step, which was sent in part; NULL: there is no residual */
    float *x;              /* receives x; NULL: x is the gradient, without a residual */
    const float *velocity; /* of momentum correction; NULL: zero */
    float *next_velocity;  /* receives the next velocity; NULL: there is no momentum correction */
    int64_t count;         /* number of sent elements, columns or bits, depending on the method */
    /* Where the tensor's parts begin in the payload and in the method's arrays, and other numbers of the tensor. */
    union { int64_t values, codes, signs, p_factor, blocks; };
    union { int64_t indices, scales, exponents, row_votes, q_factor, ends, chosen; };
    union { int64_t block_counts, sent_of_chunk, columns, shift, votes, taken; };
    union { int64_t index_bytes, found, length; };
    uint64_t key;          /* key of the tensor's random numbers in this step */
    float above, below;    /* the values sent from `kept` */
    float sent_above, sent_below; /* the values sent from x */
    int32_t rule, sent_rule;      /* which elements of `kept`, and of x, are `above` */
    hvd_product product, sent_product; /* the products sent from `kept`, and from x */
    float *total;                 /* the sum to which gradients are added */
    double sums[4];               /* sums of the current kernel; their meaning depends on the kernel */
    uint16_t *narrowed; /* receives results of 16 bits */
    int64_t narrow;     /* HVD_HALF or HVD_BFLOAT16, the type of 16-bit gradients, if `x` is not NULL; else 0 */
    uint16_t *rounded;  /* receives the residual, if it is kept rounded */
    int64_t kept_type;  /* HVD_HALF or HVD_BFLOAT16, the type of `kept` and `rounded`, if there is no `rule`; else 0 */
    const float *squares; /* the running means of the elements' squares; NULL: the elements have no scales */
    float *next_squares;  /* receives the next running means; NULL: decoding does not change them */
} hvd_segment;

/* A piece of a tensor. To sum over a tensor, kernels sum over each piece and add these sums in order, so that results
 * do not depend on the number of threads. */
typedef struct {
    int64_t segment, start, length;
    double sums[4];
    int64_t counts[2];
} hvd_task;

typedef struct {
    hvd_segment *segments;
    hvd_task *tasks; /* in the order of the segments, and of the pieces in a segment */
    int64_t segment_count, task_count;
    float factor;   /* gradients are multiplied by it */
    float decay;    /* residuals are multiplied by it */
    float momentum; /* velocities are multiplied by it */
    int32_t nesterov;
    int32_t threads;
    float share; /* gradients are multiplied by it when they are added to totals */
    int32_t keeps; /* whether residuals are kept, in the form of x */
} hvd_bucket;

/* Number of elements of a block. A core works on a block in its first-level cache. */
#define HVD_BLOCK 4096

static inline int64_t hvd_shorter(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether any task has found an inf or NaN: its first count is then not 0. */
static inline int32_t hvd_any_found(const hvd_task *tasks, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= tasks[i].counts[0];
    return (int32_t)found;
}

static inline uint32_t hvd_largest_bits(const float *restrict x, int64_t length, uint32_t largest) {
    for (int64_t i = 0; i < length; i++) {
        uint32_t bits = hvd_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* x - sent; zero if the difference overflows. */
static inline float hvd_left(float x, float sent) {
    const float left = x - sent;
    return (hvd_bits(left) & 0x7fffffffu) < HVD_INFINITE ? left : 0;
}

#define HVD_ENERGY_LANES 16

/* The sum of squares of a block. */
static inline double hvd_energy(const float *restrict x, int64_t length) {
    double lanes[HVD_ENERGY_LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + HVD_ENERGY_LANES <= length; i += HVD_ENERGY_LANES)
        for (int lane = 0; lane < HVD_ENERGY_LANES; lane++) lanes[lane] += (double)x[i + lane] * x[i + lane];
    for (int lane = 0; i < length; i++, lane++) lanes[lane] += (double)x[i] * x[i];
    for (int lane = 0; lane < HVD_ENERGY_LANES; lane++) sum += lanes[lane];
    return sum;
}

/* The numbers of a tensor to compress, from `start` on. They must have been computed already. */
static inline const float *hvd_made(const hvd_segment *s, int64_t start) {
    return (s->source ? s->source : s->x ? s->x : s->gradient) + start;
}

/* Finishes decoding a block: turns a sum over `ranks` into the mean. Returns the bits of the largest magnitude. */
static inline uint32_t hvd_mean(float *restrict sum, int64_t length, int64_t ranks, uint32_t largest) {
    if (ranks > 1) {
        const float share = (float)(1.0 / (double)ranks);
        for (int64_t i = 0; i < length; i++) sum[i] *= share;
    }
    return hvd_largest_bits(sum, length, largest);
}

#endif

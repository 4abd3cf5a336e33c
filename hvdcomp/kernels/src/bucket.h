/* The tensors of a bucket as kernels see them. `hvdcomp/kernels/tables.py` has the same fields in the same order. */
#ifndef HVDCOMP_BUCKET_H
#define HVDCOMP_BUCKET_H

#include "half.h"

/* The part of a kept x that was sent and is no part of the residual. */
enum {
    HVD_NOTHING,      /* the residual is x itself */
    HVD_NOT_NEGATIVE, /* `above` where x >= 0, elsewhere `below` */
    HVD_POSITIVE,     /* `above` where x > 0, elsewhere `below` */
    HVD_PRODUCT,      /* `product`; with gradients of 16 bits, that rounded to them */
    HVD_EVERYTHING    /* x itself */
};

/* P Q', for a tensor that is viewed as a matrix. */
typedef struct {
    const float *p, *q;    /* column by column */
    int64_t rank, columns; /* of P and Q; of the matrix */
} hvd_product;

typedef struct {
    int64_t size;          /* elements */
    const float *gradient; /* of this step; of 16 bits if `narrow` is not 0 */
    float *result;         /* for the mean over the ranks; may be the gradient's place */
    const float *source;   /* the numbers to compress; NULL: x, which `hvd_x` makes */
    const float *kept;     /* x of an earlier step, of which a part was sent; NULL: there is no residual */
    float *x;              /* for x; NULL: x is the gradient, without a residual */
    const float *velocity; /* of momentum correction; NULL: zero */
    float *next_velocity;  /* for the next velocity; NULL: there is no momentum correction */
    int64_t count;         /* of sent elements, columns or bits, by method */
    /* Begins of the tensor's parts in the payload and in the arrays of the method, and numbers of its own. */
    union { int64_t values, codes, signs, p_factor, blocks; };
    union { int64_t indices, scales, exponents, row_votes, q_factor, ends, chosen; };
    union { int64_t block_counts, sent_of_chunk, columns, shift, votes, taken; };
    union { int64_t index_bytes, found, length; };
    uint64_t key;          /* of the tensor's random numbers in this step */
    float above, below;    /* sent of `kept` */
    float sent_above, sent_below; /* sent of x */
    int32_t rule, sent_rule;      /* the elements of `kept`, and of x, that are `above` */
    hvd_product product, sent_product; /* sent of `kept`, and of x */
    float *total;                 /* to which gradients are added */
    double sums[4];               /* sums of a kernel, by kernel */
    uint16_t *narrowed; /* for results of 16 bits */
    int64_t narrow;     /* the gradients' type, HVD_HALF or HVD_BFLOAT16, where `x` is not NULL; else 0 */
    uint16_t *rounded;  /* for the rounded residual, if it is kept so */
    int64_t kept_type;  /* type of `kept` and `rounded`, HVD_HALF or HVD_BFLOAT16, without `rule`; else 0 */
} hvd_segment;

/* A piece of a tensor. Sums over a tensor are sums over each piece, added in their order, so that the number of threads
 * changes nothing. */
typedef struct {
    int64_t segment, start, length;
    double sums[4];
    int64_t counts[2];
} hvd_task;

typedef struct {
    hvd_segment *segments;
    hvd_task *tasks; /* in the order of the segments, and of the places in them */
    int64_t segment_count, task_count;
    float factor;   /* gradients are multiplied by it */
    float decay;    /* residuals are multiplied by it */
    float momentum; /* velocities are multiplied by it */
    int32_t nesterov;
    int32_t threads;
    float share; /* gradients are multiplied by it when they are added to totals */
    int32_t keeps; /* whether residuals are kept, as x */
} hvd_bucket;

/* Elements of a block, which a core works on in its first cache. */
#define HVD_BLOCK 4096

static inline int64_t hvd_shorter(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether the first count of any task is not 0: it has found an inf or NaN. */
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

/* x - sent; zero if that overflows. */
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

/* The numbers to compress of a tensor, from `start` on, once they are made. */
static inline const float *hvd_made(const hvd_segment *s, int64_t start) {
    return (s->source ? s->source : s->x ? s->x : s->gradient) + start;
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

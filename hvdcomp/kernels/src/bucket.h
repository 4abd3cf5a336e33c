/* The tensors of a bucket as kernels see them. `hvdcomp/kernels/tables.py` has the same fields in the same order. */
#ifndef HVDCOMP_BUCKET_H
#define HVDCOMP_BUCKET_H

#include "half.h"

/* What of a kept x was sent, and so is no part of the residual. */
enum {
    HVD_NOTHING,      /* the residual is x itself */
    HVD_NOT_NEGATIVE, /* `above` where x >= 0, elsewhere `below` */
    HVD_POSITIVE,     /* `above` where x > 0, elsewhere `below` */
    HVD_PRODUCT,      /* `product` */
    HVD_EVERYTHING    /* x itself */
};

/* P Q', of the matrix that a tensor is viewed as. */
typedef struct {
    const float *p, *q;    /* column by column */
    int64_t rank, columns; /* of both; of the matrix */
} hvd_product;

typedef struct {
    int64_t size;          /* elements */
    const float *gradient; /* of this step; of 16 bits, where `narrow` says so */
    float *result;         /* where the mean over the ranks goes; may be the gradient's place */
    const float *source;   /* what is to be compressed where that is known; NULL: x, which `hvd_x` makes */
    const float *kept;     /* x of an earlier step, of which a part was sent; NULL: there is no residual */
    float *x;              /* where x goes; NULL: nothing is added to the gradient, which is x then */
    const float *velocity; /* of momentum correction; NULL: zero */
    float *next_velocity;  /* where the next velocity goes; NULL: there is no momentum correction */
    int64_t count;         /* of elements, columns or bits to send: up to the method */
    int64_t place[4];      /* where the tensor's parts begin in the payload: up to the method */
    uint64_t key;          /* of the tensor's random numbers in this step */
    float above, below;    /* sent of `kept` */
    float sent_above, sent_below; /* sent of x */
    int32_t rule, sent_rule;      /* which element of `kept`, and of x, is `above` */
    hvd_product product, sent_product; /* sent of `kept`, and of x */
    float *total;                 /* to which gradients are added */
    double sums[4];               /* what a kernel adds up: up to the kernel */
    uint16_t *narrowed; /* where results of 16 bits go in the end */
    int64_t narrow;     /* HVD_HALF or HVD_BFLOAT16: of what type gradients are, and `x` is not NULL; else 0 */
    uint16_t *rounded;  /* where what is left of x goes in the end, rounded, if it is kept so */
    int64_t kept_type;  /* HVD_HALF or HVD_BFLOAT16: of what type `kept` and `rounded` are, and no `rule`; else 0 */
} hvd_segment;

/* A piece of a tensor. What is added up over a tensor is added up over each piece first, and then in their order, so
 * that the number of threads changes nothing. */
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
    int32_t keeps; /* whether what is not sent is kept, as x */
} hvd_bucket;

/* Elements that are worked on while they lie in a core's first cache. */
#define HVD_BLOCK 4096

static inline int64_t hvd_shorter(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether any of the tasks has found an inf or NaN, which it says by its first count. */
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

/* x - sent; where that overflows, zero. */
static inline float hvd_left(float x, float sent) {
    const float left = x - sent;
    return (hvd_bits(left) & 0x7fffffffu) < HVD_INFINITE ? left : 0;
}

/* Elements of P Q', from `start` on. Each is added up column after column, as `isa_lowrank.c` does it. */
static inline void hvd_multiply(
    const hvd_product *product, int64_t size, int64_t start, int64_t length, float *restrict out
) {
    const int64_t columns = product->columns, rows = size / columns;
    for (int64_t end = start + length; start < end;) {
        const int64_t first = start % columns, some = hvd_shorter(columns - first, end - start);
        const float *p = product->p + start / columns, *restrict q = product->q + first;
        int64_t k = 1;
        if (product->rank >= 4) {
            const float p0 = p[0], p1 = p[rows], p2 = p[2 * rows], p3 = p[3 * rows];
            const float *restrict q1 = q + columns, *restrict q2 = q1 + columns, *restrict q3 = q2 + columns;
            for (int64_t i = 0; i < some; i++) out[i] = p0 * q[i] + p1 * q1[i] + p2 * q2[i] + p3 * q3[i];
            k = 4;
        } else
            for (int64_t i = 0; i < some; i++) out[i] = p[0] * q[i];
        for (; k < product->rank; k++)
            for (int64_t i = 0; i < some; i++) out[i] += p[k * rows] * q[k * columns + i];
        start += some;
        out += some;
    }
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

/* The residual of a block: what was not sent of the block `kept`, times `decay`. */
static inline void hvd_residual(
    const hvd_segment *s, const float *restrict kept, int64_t start, int64_t length, float decay, float *restrict out
) {
    const float above = s->above, below = s->below;
    if (s->rule == HVD_PRODUCT) {
        hvd_multiply(&s->product, s->size, start, length, out);
        for (int64_t i = 0; i < length; i++) out[i] = hvd_left(kept[i], out[i]) * decay;
    } else if (s->rule == HVD_NOT_NEGATIVE)
        for (int64_t i = 0; i < length; i++) out[i] = (kept[i] - (kept[i] >= 0 ? above : below)) * decay;
    else if (s->rule == HVD_POSITIVE)
        for (int64_t i = 0; i < length; i++) out[i] = (kept[i] - (kept[i] > 0 ? above : below)) * decay;
    else if (s->rule == HVD_EVERYTHING) memset(out, 0, (size_t)length * sizeof *out);
    else
        for (int64_t i = 0; i < length; i++) out[i] = kept[i] * decay;
}

/* A block of x, of the blocks of its gradient and of what was kept, if anything. */
static inline void hvd_make_of(
    const hvd_bucket *b, const hvd_segment *s, const float *restrict gradient, const float *restrict kept,
    int64_t start, int64_t length, float *restrict x
) {
    const float factor = b->factor, momentum = b->momentum;
    if (s->next_velocity) {
        float *restrict next = s->next_velocity + start;
        if (s->velocity) {
            const float *restrict velocity = s->velocity + start;
            for (int64_t i = 0; i < length; i++) next[i] = velocity[i] * momentum + gradient[i] * factor;
        } else
            for (int64_t i = 0; i < length; i++) next[i] = gradient[i] * factor;
        if (kept) hvd_residual(s, kept, start, length, b->decay, x);
        else memset(x, 0, (size_t)length * sizeof *x);
        if (b->nesterov)
            for (int64_t i = 0; i < length; i++) x[i] = next[i] * momentum + (x[i] + gradient[i] * factor);
        else
            for (int64_t i = 0; i < length; i++) x[i] = x[i] + next[i];
    } else if (kept) {
        /* The same sum as with hvd_residual, if possible without a second pass over the block. */
        const float decay = b->decay, above = s->above, below = s->below;
        if (s->rule == HVD_PRODUCT) {
            hvd_residual(s, kept, start, length, decay, x);
            for (int64_t i = 0; i < length; i++) x[i] = x[i] + gradient[i] * factor;
        } else if (s->rule == HVD_NOT_NEGATIVE)
            for (int64_t i = 0; i < length; i++)
                x[i] = (kept[i] - (kept[i] >= 0 ? above : below)) * decay + gradient[i] * factor;
        else if (s->rule == HVD_POSITIVE)
            for (int64_t i = 0; i < length; i++)
                x[i] = (kept[i] - (kept[i] > 0 ? above : below)) * decay + gradient[i] * factor;
        else if (s->rule == HVD_EVERYTHING)
            for (int64_t i = 0; i < length; i++) x[i] = 0 + gradient[i] * factor;
        else
            for (int64_t i = 0; i < length; i++) x[i] = kept[i] * decay + gradient[i] * factor;
    } else
        for (int64_t i = 0; i < length; i++) x[i] = gradient[i] * factor;
}

/* A block of numbers of 16 bits, of `type`, as floats. */
static inline void hvd_widened(const void *numbers, int64_t type, int64_t start, int64_t length, float *restrict out) {
    hvd_widen((const uint16_t *)numbers + start, length, (int32_t)type, out);
}

#define HVD_WIDENED 1024 /* elements that are widened at a time */

/* A block of x: the gradient with what the memory adds. */
static inline void hvd_make(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, float *restrict x
) {
    float gradients[HVD_WIDENED], residuals[HVD_WIDENED];
    if (!s->narrow && !(s->kept && s->kept_type)) {
        hvd_make_of(b, s, s->gradient + start, s->kept ? s->kept + start : NULL, start, length, x);
        return;
    }
    for (const int64_t end = start + length; start < end; start += HVD_WIDENED, x += HVD_WIDENED) {
        const int64_t some = hvd_shorter(HVD_WIDENED, end - start);
        const float *gradient = gradients, *kept = residuals;
        if (s->narrow) hvd_widened(s->gradient, s->narrow, start, some, gradients);
        else gradient = s->gradient + start;
        if (s->kept && s->kept_type) hvd_widened(s->kept, s->kept_type, start, some, residuals);
        else kept = s->kept ? s->kept + start : NULL;
        hvd_make_of(b, s, gradient, kept, start, some, x);
    }
}

/* What is compressed of a tensor, from `start` on, once it is made. */
static inline const float *hvd_made(const hvd_segment *s, int64_t start) {
    return (s->source ? s->source : s->x ? s->x : s->gradient) + start;
}

/* Makes a block of x where the bucket keeps it.
 *
 * start, length: of the block, at most HVD_BLOCK elements.
 * largest: is raised to the largest magnitude's bits, of which those of inf and NaN are the highest.
 * Returns: the block of x, or of what is to be compressed in its place.
 */
static inline const float *hvd_x(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, uint32_t *largest
) {
    const float *made = hvd_made(s, start);
    if (s->x && !s->source) hvd_make(b, s, start, length, s->x + start);
    *largest = hvd_largest_bits(made, length, *largest);
    return made;
}

/* The same of a block that nobody else reads: where gradients are of 16 bits and nothing is kept, x is in `room`. */
static inline const float *hvd_x_once(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, float *room, uint32_t *largest
) {
    if (!s->narrow || b->keeps || s->source) return hvd_x(b, s, start, length, largest);
    hvd_make(b, s, start, length, room);
    *largest = hvd_largest_bits(room, length, *largest);
    return room;
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

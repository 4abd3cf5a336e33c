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
    int64_t place[4];      /* begins of the tensor's parts in the payload, by method */
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

/* Elements of P Q', from `start` on. Each is a sum column after column, as in `isa_lowrank.c`. */
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

#define HVD_WIDENED 1024 /* elements of 16 bits that are widened at a time */

/* What is left of a block x that `sent` was sent of, where results are those numbers rounded to a type of 16 bits: with
 * the rounding error. In the place of `sent`. */
static inline void hvd_left_of_rounded(
    const float *restrict x, int64_t type, int64_t length, float decay, float *restrict sent
) {
    uint16_t results[HVD_WIDENED];
    float read[HVD_WIDENED];
    for (int64_t start = 0; start < length; start += HVD_WIDENED, x += HVD_WIDENED, sent += HVD_WIDENED) {
        const int64_t some = hvd_shorter(HVD_WIDENED, length - start);
        hvd_narrow(sent, some, (int32_t)type, results);
        hvd_widen(results, some, (int32_t)type, read);
        for (int64_t i = 0; i < some; i++) sent[i] = (hvd_left(x[i], sent[i]) + (sent[i] - read[i])) * decay;
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

/* The residual of a block: the part of the block `kept` that was not sent, times `decay`. */
static inline void hvd_residual(
    const hvd_segment *s, const float *restrict kept, int64_t start, int64_t length, float decay, float *restrict out
) {
    const float above = s->above, below = s->below;
    if (s->rule == HVD_PRODUCT) {
        hvd_multiply(&s->product, s->size, start, length, out);
        if (s->narrow) hvd_left_of_rounded(kept, s->narrow, length, decay, out);
        else
            for (int64_t i = 0; i < length; i++) out[i] = hvd_left(kept[i], out[i]) * decay;
    } else if (s->rule == HVD_NOT_NEGATIVE)
        for (int64_t i = 0; i < length; i++) out[i] = (kept[i] - (kept[i] >= 0 ? above : below)) * decay;
    else if (s->rule == HVD_POSITIVE)
        for (int64_t i = 0; i < length; i++) out[i] = (kept[i] - (kept[i] > 0 ? above : below)) * decay;
    else if (s->rule == HVD_EVERYTHING) memset(out, 0, (size_t)length * sizeof *out);
    else
        for (int64_t i = 0; i < length; i++) out[i] = kept[i] * decay;
}

/* A block of x, from the blocks of its gradient and, if there is one, of the kept x. */
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

/* A block of x: the gradient plus residual and momentum. */
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

/* The numbers to compress of a tensor, from `start` on, once they are made. */
static inline const float *hvd_made(const hvd_segment *s, int64_t start) {
    return (s->source ? s->source : s->x ? s->x : s->gradient) + start;
}

/* Makes a block of x where the bucket keeps it.
 *
 * start, length: of the block, at most HVD_BLOCK elements.
 * largest: is raised to the largest magnitude's bits, of which those of inf and NaN are the highest.
 * Returns: the block of x, or of the source that is compressed in its place.
 */
static inline const float *hvd_x(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, uint32_t *largest
) {
    const float *made = hvd_made(s, start);
    if (s->x && !s->source) hvd_make(b, s, start, length, s->x + start);
    *largest = hvd_largest_bits(made, length, *largest);
    return made;
}

/* `hvd_x` for a block that nobody else reads: if gradients have 16 bits and nothing is kept, x is in `room`. */
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

/* Computes x and residuals block by block, and rounds results to 16 bits (see `make.h` and `put.h`). */
#include "make.h"
#include "masks.h"
#include "put.h"

/* Computes elements of P Q' from `start` on. Each element is a sum over the columns in order, as in `isa_lowrank.c`. */
static inline void multiply(
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

/* Computes the residual of a block x from which the values `sent` were sent. The results are these values rounded to a
 * 16-bit type, so the residual includes the rounding error. It is written over `sent`. */
static inline void left_of_rounded(
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

void HVD_NAME(residual)(
    const hvd_segment *s, const float *restrict kept, int64_t start, int64_t length, float decay, float *restrict out
) {
    const float above = s->above, below = s->below;
    if (s->rule == HVD_PRODUCT) {
        multiply(&s->product, s->size, start, length, out);
        if (s->narrow) left_of_rounded(kept, s->narrow, length, decay, out);
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

/* Computes a block of x from the same block of the gradient and, if there is a kept x, of the kept x. */
static inline void make_of(
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
        if (kept) HVD_NAME(residual)(s, kept, start, length, b->decay, x);
        else memset(x, 0, (size_t)length * sizeof *x);
        if (b->nesterov)
            for (int64_t i = 0; i < length; i++) x[i] = next[i] * momentum + (x[i] + gradient[i] * factor);
        else
            for (int64_t i = 0; i < length; i++) x[i] = x[i] + next[i];
    } else if (kept) {
        /* Computes the same sum as with `residual`, without a second pass over the block if possible. */
        const float decay = b->decay, above = s->above, below = s->below;
        if (s->rule == HVD_PRODUCT) {
            HVD_NAME(residual)(s, kept, start, length, decay, x);
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

void HVD_NAME(make)(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, float *restrict x
) {
    float gradients[HVD_WIDENED], residuals[HVD_WIDENED];
    if (!s->narrow && !(s->kept && s->kept_type)) {
        make_of(b, s, s->gradient + start, s->kept ? s->kept + start : NULL, start, length, x);
        return;
    }
    for (const int64_t end = start + length; start < end; start += HVD_WIDENED, x += HVD_WIDENED) {
        const int64_t some = hvd_shorter(HVD_WIDENED, end - start);
        const float *gradient = gradients, *kept = residuals;
        if (s->narrow) hvd_widened(s->gradient, s->narrow, start, some, gradients);
        else gradient = s->gradient + start;
        if (s->kept && s->kept_type) hvd_widened(s->kept, s->kept_type, start, some, residuals);
        else kept = s->kept ? s->kept + start : NULL;
        make_of(b, s, gradient, kept, start, some, x);
    }
}

/* Most cache lines of x do not change if few elements were sent. */
static inline void add_some(const float *restrict some, int64_t length, float *restrict x) {
    int64_t start = 0;
    for (; start + 64 <= length; start += 64) {
        uint64_t mask = hvd_reaching64(some + start, 1);
        for (int64_t line = start; mask; line += 16, mask >>= 16)
            if (mask & 0xffff)
                for (int64_t i = line; i < line + 16; i++) x[i] += some[i];
    }
    for (; start < length; start++) x[start] += some[start];
}

/* Rounds a block of means to 16 bits. `lacks` receives the amounts by which rounding lowers the means. */
static inline void round_means(
    const float *restrict mean, int64_t length, int32_t type, uint16_t *restrict results, float *restrict lacks
) {
    if (type == HVD_BFLOAT16)
        for (int64_t i = 0; i < length; i++) {
            results[i] = hvd_to_bfloat16(mean[i]);
            lacks[i] = mean[i] - hvd_from_bfloat16(results[i]);
        }
    else {
        hvd_to_halves(mean, length, results);
        hvd_from_halves(results, length, lacks);
        for (int64_t i = 0; i < length; i++) lacks[i] = mean[i] - lacks[i];
    }
}

int HVD_NAME(put_rounded)(
    const hvd_bucket *b, const hvd_segment *s, int64_t start, int64_t length, const float *mean
) {
    const hvd_segment left = hvd_unsent(s);
    const int32_t type = (int32_t)s->narrow;
    const int keeps = b->keeps && s->sent_rule != HVD_PRODUCT; /* the next step rounds a product again */
    float lacks[HVD_WIDENED], unsent[HVD_WIDENED];
    uint16_t highest = 0;
    for (const int64_t end = start + length; start < end; start += HVD_WIDENED, mean += HVD_WIDENED) {
        const int64_t some = hvd_shorter(HVD_WIDENED, end - start);
        uint16_t *results = s->narrowed + start;
        if (keeps) round_means(mean, some, type, results, lacks);
        else hvd_narrow(mean, some, type, results);
        for (int64_t i = 0; i < some; i++) {
            const uint16_t magnitude = results[i] & 0x7fffu;
            highest = magnitude > highest ? magnitude : highest;
        }
        if (!keeps) continue;
        float *x = s->x + start;
        if (s->sent_rule != HVD_NOTHING) {
            HVD_NAME(residual)(&left, x, start, some, 1, unsent);
            for (int64_t i = 0; i < some; i++) x[i] = unsent[i] + lacks[i];
        } else
            add_some(lacks, some, x);
    }
    return highest >= (type == HVD_HALF ? 0x7c00 : 0x7f80);
}

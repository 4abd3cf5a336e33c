/* The factors of low-rank approximations: makes columns orthonormal, and chooses the columns for the next warm
 * start. */
#include <math.h>

#include "lowrank.h"

#define DEPENDENT 1e-5f /* a column with at most this relative remainder is dependent: the rest is rounding error */

/* The 2-norm of a column. In double precision, squares neither overflow nor underflow to zero. */
static float wide_norm(const float *column, int64_t length) {
    double lanes[HVD_LANES] = {0}, rest = 0;
    int64_t i = 0;
    for (; i + HVD_LANES <= length; i += HVD_LANES)
        for (int lane = 0; lane < HVD_LANES; lane++) lanes[lane] += (double)column[i + lane] * column[i + lane];
    for (; i < length; i++) rest += (double)column[i] * column[i];
    for (int width = HVD_LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return (float)sqrt(lanes[0] + rest);
}

/* Subtracts the component along `unit` from each of some columns. */
HVD_INLINE void take_off(int columns, const float *unit, int64_t length, float *rest) {
    float along[4];
    hvd_dots(1, columns, unit, 0, rest, length, length, along, NULL);
    for (int k = 0; k < columns; k++) {
        float *restrict column = rest + k * length;
        for (int64_t i = 0; i < length; i++) column[i] -= unit[i] * along[k];
    }
}

void HVD_NAME(orthogonalize)(const float *columns, int64_t count, int64_t length, float *unit) {
    for (int64_t k = 0; k < count; k++) {
        const float norm = wide_norm(columns + k * length, length), scale = norm > HVD_SMALLEST_NORM ? 1 / norm : 0;
        for (int64_t i = 0; i < length; i++) unit[k * length + i] = columns[k * length + i] * scale;
    }
    for (int64_t k = 1; k < count; k++) {
        float *column = unit + k * length, square;
        int64_t next = k;
        for (; next + 4 <= count; next += 4) take_off(4, column - length, length, unit + next * length);
        for (; next < count; next++) take_off(1, column - length, length, unit + next * length);
        hvd_dots(1, 1, column, 0, column, 0, length, &square, NULL);
        const float norm = sqrtf(square), scale = norm > DEPENDENT ? 1 / norm : 0;
        for (int64_t i = 0; i < length; i++) column[i] *= scale;
    }
}

struct choice {
    const hvd_bucket *bucket;
    const float *fresh, *old;
    float *next;
    int32_t of_rows;
};

static void choose(void *context, int64_t number) {
    const struct choice *choice = context;
    const hvd_segment *s = choice->bucket->segments + number;
    const int64_t length = choice->of_rows ? s->size / s->columns : s->columns;
    for (int64_t k = 0; k < s->count; k++) {
        const int64_t start = (choice->of_rows ? s->p_factor : s->q_factor) + k * length;
        const float norm = wide_norm(choice->fresh + start, length);
        const float *from = norm > HVD_SMALLEST_NORM && norm < 1 / HVD_SMALLEST_NORM ? choice->fresh : choice->old;
        memcpy(choice->next + start, from + start, (size_t)length * sizeof *from);
    }
}

int32_t HVD_NAME(lowrank_keep)(hvd_bucket *bucket, const float *fresh, const float *old, float *next, int32_t of_rows) {
    struct choice choice = {bucket, fresh, old, next, of_rows};
    hvd_parallel(bucket->threads, bucket->segment_count, choose, &choice);
    return 0;
}

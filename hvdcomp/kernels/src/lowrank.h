/* Products of a matrix with a few columns. Factors are stored column by column: element i of column k is at k * stride
 * + i. */
#ifndef HVD_LOWRANK_H
#define HVD_LOWRANK_H

#include "isa.h"
#include "lanes.h"

/* A column whose norm is at most this number counts as zero, as in hvdcomp/kernels/limits.py. */
#define HVD_SMALLEST_NORM 0x1p-110f

/* Computes the products of some rows with some columns, all of `length` elements, and stores them in out[row * 4 +
 * column].
 *
 * rows, columns: at most 2 and 4. They are known at compile time, as in all functions in this file that are always
 * inline.
 * ahead: addresses to prefetch, or NULL: the sources of the next rows, which are `y_stride` apart, and their
 * destination (NULL if it is not prefetched). */
HVD_INLINE void hvd_dots(
    int rows, int columns, const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t length,
    float *out, const float *const *ahead
) {
    hvd_vector sums[2][4][HVD_PARTS];
    float rest[2][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < columns; k++) {
            rest[r][k] = 0;
            for (int part = 0; part < HVD_PARTS; part++) sums[r][k][part] = (hvd_vector){0};
        }
    int64_t j = 0;
    for (; j + HVD_LANES <= length; j += HVD_LANES) {
        if (ahead)
            for (int r = 0; r < rows; r++) {
                __builtin_prefetch(ahead[0] + r * y_stride + j);
                __builtin_prefetch(ahead[1] + r * y_stride + j);
                if (ahead[2]) __builtin_prefetch(ahead[2] + r * y_stride + j, 1);
            }
        for (int part = 0; part < HVD_PARTS; part++) {
            const int64_t at = j + part * HVD_WIDTH;
            for (int k = 0; k < columns; k++) {
                const hvd_vector one = hvd_load(y + k * y_stride + at);
                for (int r = 0; r < rows; r++) sums[r][k][part] += hvd_load(x + r * x_stride + at) * one;
            }
        }
    }
    for (; j < length; j++)
        for (int r = 0; r < rows; r++)
            for (int k = 0; k < columns; k++) rest[r][k] += x[r * x_stride + j] * y[k * y_stride + j];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < columns; k++) out[r * 4 + k] = hvd_sum(sums[r][k]) + rest[r][k];
}

/* Computes orthonormal columns with the same span as the columns (count, length), by modified Gram-Schmidt, and writes
 * them to `unit`.
 *
 * A column becomes zero if it is nearly zero, if its norm overflows, or if it depends linearly on the columns before
 * it. */
void HVD_NAME(orthogonalize)(const float *columns, int64_t count, int64_t length, float *unit);

#endif

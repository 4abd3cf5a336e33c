/* PowerSGD approximates each tensor, as a matrix M with `columns` columns, by P Q'. A segment's `count` is its rank.
 * One array holds the factors P of all tensors of the bucket; the segment's P begins at `p_factor` in this array.
 * Likewise, its Q begins at `q_factor` in the array of all Q.
 *
 * For P = M Q and for P Q', rows of M are divided among the threads. For Q = M' P, columns are. Therefore no sum
 * depends on the number of threads. */
#include "lowrank.h"
#include "make.h"
#include "put.h"

#define CHUNK 1024 /* columns of a row that are processed at once; the values of Q stay in the first-level cache */

struct job {
    const hvd_bucket *bucket;
    hvd_task *tasks;
    const float *factors; /* the given columns */
    float *unit;          /* the orthonormalized columns */
    float *out;
    const float *p, *q;
    int32_t makes_x;
    int streams; /* whether x or results are written past the caches */
};

/* Computes a piece of x, if the job computes x. */
static inline void visit(
    const struct job *job, const hvd_segment *s, int64_t start, int64_t length, uint32_t *largest
) {
    if (job->makes_x) hvd_x(job->bucket, s, start, length, largest);
}

/* Computes P = M Q. */

static void orthogonalize_q(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    HVD_NAME(orthogonalize)(job->factors + s->q_factor, s->count, s->columns, job->unit + s->q_factor);
}

HVD_INLINE void multiply_rows(
    int rows, const float *x, int64_t x_stride, const float *q, int64_t columns, int64_t length, float *p,
    int64_t p_stride, int64_t rank, const float *const *ahead
) {
    float sums[2 * 4];
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) {
        hvd_dots(rows, 4, x, x_stride, q + k * columns, columns, length, sums, ahead);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++) p[(k + i) * p_stride + r] += sums[r * 4 + i];
    }
    for (; k + 2 <= rank; k += 2) {
        hvd_dots(rows, 2, x, x_stride, q + k * columns, columns, length, sums, ahead);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 2; i++) p[(k + i) * p_stride + r] += sums[r * 4 + i];
    }
    for (; k < rank; k++) {
        hvd_dots(rows, 1, x, x_stride, q + k * columns, columns, length, sums, ahead);
        for (int r = 0; r < rows; r++) p[k * p_stride + r] += sums[r * 4];
    }
}

static void rows_of_p(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t columns = s->columns, rows = s->size / columns, rank = s->count;
    const int64_t first = task->start, end = task->start + task->length;
    /* x is written to memory; a copy in `block` is used for the products. */
    const int streams = job->streams && s->x && !s->source;
    float block[HVD_BLOCK] __attribute__((aligned(64)));
    float *p = job->out + s->p_factor;
    const float *unit = job->unit + s->q_factor, *matrix = hvd_made(s, 0);
    uint32_t largest = 0;
    for (int64_t k = 0; k < rank; k++) memset(p + k * rows + first, 0, (size_t)task->length * sizeof *p);
    for (int64_t start = 0; start < columns; start += CHUNK) {
        const int64_t length = hvd_shorter(columns - start, CHUNK), group = columns <= CHUNK ? HVD_BLOCK / columns : 2;
        for (int64_t row = first; row < end; row += group) {
            const int64_t last = hvd_shorter(row + group, end), here = row * columns + start;
            const int64_t pieces = length == columns ? 1 : last - row, piece = (last - row) / pieces * length;
            for (int64_t i = 0; i < pieces; i++)
                if (streams) {
                    HVD_NAME(make)(job->bucket, s, here + i * columns, piece, block + i * length);
                    hvd_copy(s->x + here + i * columns, block + i * length, piece, 1);
                } else visit(job, s, here + i * columns, piece, &largest);
            if (streams) largest = hvd_largest_bits(block, pieces * piece, largest);
            const int64_t next = row + group < end         ? here + group * columns
                                 : start + CHUNK < columns ? first * columns + start + CHUNK
                                                           : here;
            const float *x = streams ? block : matrix + here;
            const float *ahead[3] = {matrix + next, matrix + next, matrix + next};
            if (job->makes_x) {
                ahead[0] = s->narrow ? NULL : s->gradient + next;
                if (s->kept && !s->kept_type) ahead[1] = s->kept + next;
                if (streams) ahead[2] = NULL;
            }
            const int64_t stride = streams ? length : columns;
            int64_t i = row;
            for (; i + 2 <= last; i += 2) {
                multiply_rows(2, x, stride, unit + start, columns, length, p + i, rows, rank, ahead);
                x += 2 * stride;
                for (int k = 0; k < 3; k++)
                    if (ahead[k]) ahead[k] += 2 * columns;
            }
            if (i < last) multiply_rows(1, x, stride, unit + start, columns, length, p + i, rows, rank, ahead);
        }
    }
    hvd_fence();
    for (int64_t k = 0; k < rank; k++) largest = hvd_largest_bits(p + k * rows + first, task->length, largest);
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(lowrank_p)(
    hvd_bucket *bucket, hvd_task *tasks, int64_t count, const float *q, float *unit, float *p, int32_t makes_x
) {
    struct job job = {.bucket = bucket, .tasks = tasks, .factors = q, .unit = unit, .out = p, .makes_x = makes_x};
    job.streams = makes_x && hvd_is_large(bucket);
    hvd_parallel(bucket->threads, bucket->segment_count, orthogonalize_q, &job);
    hvd_parallel(bucket->threads, count, rows_of_p, &job);
    return hvd_any_found(tasks, count);
}

/* Computes Q = M' P. */

static void orthogonalize_p(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_segment *s = job->bucket->segments + number;
    HVD_NAME(orthogonalize)(job->factors + s->p_factor, s->count, s->size / s->columns, job->unit + s->p_factor);
}

/* Adds rows of M, each multiplied by its element of P, to columns of Q. */
HVD_INLINE void add_rows(
    int rows, int rank, const float *x, int64_t columns, const float *p, int64_t p_stride, float *q, int64_t length
) {
    hvd_vector factors[4][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < rank; k++) factors[r][k] = hvd_all(p[k * p_stride + r]);
    int64_t j = 0;
    for (; j + HVD_WIDTH <= length; j += HVD_WIDTH) {
        hvd_vector sums[4];
        for (int k = 0; k < rank; k++) sums[k] = hvd_load(q + k * columns + j);
        for (int r = 0; r < rows; r++) {
            const hvd_vector one = hvd_load(x + r * columns + j);
            __builtin_prefetch(x + (r + rows) * columns + j);
            for (int k = 0; k < rank; k++) sums[k] += one * factors[r][k];
        }
        for (int k = 0; k < rank; k++) hvd_store(q + k * columns + j, sums[k]);
    }
    for (; j < length; j++)
        for (int k = 0; k < rank; k++) {
            float sum = q[k * columns + j];
            for (int r = 0; r < rows; r++) sum += x[r * columns + j] * p[k * p_stride + r];
            q[k * columns + j] = sum;
        }
}

HVD_INLINE void add_rows_of_any_rank(
    int rows, int64_t rank, const float *x, int64_t columns, const float *p, int64_t p_stride, float *q, int64_t length
) {
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) add_rows(rows, 4, x, columns, p + k * p_stride, p_stride, q + k * columns, length);
    for (; k + 2 <= rank; k += 2) add_rows(rows, 2, x, columns, p + k * p_stride, p_stride, q + k * columns, length);
    for (; k < rank; k++) add_rows(rows, 1, x, columns, p + k * p_stride, p_stride, q + k * columns, length);
}

static void columns_of_q(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t columns = s->columns, rows = s->size / columns, rank = s->count;
    float *q = job->out + s->q_factor + task->start;
    const float *unit = job->unit + s->p_factor, *matrix = hvd_made(s, task->start);
    uint32_t largest = 0;
    for (int64_t k = 0; k < rank; k++) memset(q + k * columns, 0, (size_t)task->length * sizeof *q);
    for (int64_t row = 0; row < rows; row += 4) {
        const int64_t last = hvd_shorter(row + 4, rows);
        if (task->length == columns) visit(job, s, row * columns, (last - row) * columns, &largest);
        else
            for (int64_t i = row; i < last; i++) visit(job, s, i * columns + task->start, task->length, &largest);
        if (last - row == 4)
            add_rows_of_any_rank(4, rank, matrix + row * columns, columns, unit + row, rows, q, task->length);
        else
            for (int64_t i = row; i < last; i++)
                add_rows_of_any_rank(1, rank, matrix + i * columns, columns, unit + i, rows, q, task->length);
    }
    for (int64_t k = 0; k < rank; k++) largest = hvd_largest_bits(q + k * columns, task->length, largest);
    task->counts[0] = largest >= HVD_INFINITE;
}

int32_t HVD_NAME(lowrank_q)(
    hvd_bucket *bucket, hvd_task *tasks, int64_t count, const float *p, float *unit, float *q, int32_t makes_x
) {
    struct job job = {.bucket = bucket, .tasks = tasks, .factors = p, .unit = unit, .out = q, .makes_x = makes_x};
    hvd_parallel(bucket->threads, bucket->segment_count, orthogonalize_p, &job);
    hvd_parallel(bucket->threads, count, columns_of_q, &job);
    return hvd_any_found(tasks, count);
}

/* Computes P Q'. */

/* Computes a piece of a row of P Q'. Returns whether any number is not finite. `multiply` in isa_make.c gives the same
 * numbers.
 *
 * rank, streams: may be compile-time constants; streams: whether the result is written past the caches. */
HVD_INLINE int decode_row(
    int64_t rank, int streams, const float *p, int64_t p_stride, const float *q, int64_t columns, int64_t length,
    float *result
) {
    hvd_bits_vector found[HVD_PARTS] = {0}; /* a finite number minus itself is 0 */
    int64_t j = 0;
    for (; j + HVD_LANES <= length; j += HVD_LANES)
        for (int part = 0; part < HVD_PARTS; part++) {
            const int64_t at = j + part * HVD_WIDTH;
            hvd_vector sum = p[0] * hvd_load(q + at);
            for (int64_t k = 1; k < rank; k++) sum += p[k * p_stride] * hvd_load(q + k * columns + at);
            found[part] |= (hvd_bits_vector)(sum - sum);
            if (streams) hvd_stream(result + at, sum);
            else hvd_store(result + at, sum);
        }
    int32_t all = 0;
    for (int part = 0; part < HVD_PARTS; part++)
        for (int lane = 0; lane < HVD_WIDTH; lane++) all |= found[part][lane];
    for (; j < length; j++) {
        float sum = p[0] * q[j];
        for (int64_t k = 1; k < rank; k++) sum += p[k * p_stride] * q[k * columns + j];
        all |= (hvd_bits(sum) & HVD_INFINITE) == HVD_INFINITE;
        result[j] = sum;
    }
    return all != 0;
}

HVD_INLINE int decode_row_of_any_rank(
    int streams, const float *p, int64_t p_stride, const float *q, int64_t columns, int64_t rank, int64_t length,
    float *result
) {
    switch (rank) {
    case 1: return decode_row(1, streams, p, p_stride, q, columns, length, result);
    case 2: return decode_row(2, streams, p, p_stride, q, columns, length, result);
    case 4: return decode_row(4, streams, p, p_stride, q, columns, length, result);
    default: return decode_row(rank, streams, p, p_stride, q, columns, length, result);
    }
}

static void decode_rows(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const int64_t columns = s->columns, rows = s->size / columns;
    const float *q = job->q + s->q_factor;
    float room[CHUNK];
    int found = 0;
    for (int64_t start = 0; start < columns; start += CHUNK) {
        const int64_t length = hvd_shorter(columns - start, CHUNK);
        for (int64_t row = task->start; row < task->start + task->length; row++) {
            const int64_t at = row * columns + start;
            const float *p = job->p + s->p_factor + row;
            float *result = s->narrow ? room : s->result + at;
            if (!s->narrow && job->streams && (uintptr_t)result % sizeof(hvd_vector) == 0)
                found |= decode_row_of_any_rank(1, p, rows, q + start, columns, s->count, length, result);
            else found |= decode_row_of_any_rank(0, p, rows, q + start, columns, s->count, length, result);
            found |= hvd_put(job->bucket, s, at, length, result, 0, 0) >= HVD_INFINITE;
        }
    }
    hvd_fence();
    task->counts[0] = found;
}

int32_t HVD_NAME(lowrank_decode)(hvd_bucket *bucket, hvd_task *tasks, int64_t count, const float *p, const float *q) {
    struct job job = {.bucket = bucket, .tasks = tasks, .p = p, .q = q, .streams = hvd_is_large(bucket)};
    hvd_parallel(bucket->threads, count, decode_rows, &job);
    return hvd_any_found(tasks, count);
}

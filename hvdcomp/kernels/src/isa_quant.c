/* Codes that are fractions of a scale. In QSGD, a scale is the norm of `length` neighboring elements. In block
 * quantizers, a scale is the largest magnitude of `length` elements. TernGrad has one scale for each tensor.
 *
 * A tensor's codes of `count` bits begin at `codes` of a payload, and its float scales at `scales`, a multiple of
 * 4. */
#include <math.h>

#include "float8.h"
#include "make.h"
#include "packing.h"
#include "put.h"
#include "quant.h"

struct job {
    const hvd_bucket *bucket;
    uint8_t *payload;
    const uint8_t *payloads;
    int64_t ranks, row; /* row: bytes of a rank's payload */
    int64_t length;     /* number of elements that share a scale */
    int64_t first;      /* number of the first task */
    int32_t known;      /* whether x and the scales are already known */
    int32_t large;      /* whether results are written past the caches */
    int32_t norms;      /* whether scales are norms; otherwise they are largest magnitudes */
    int32_t nearest;    /* whether elements are rounded to the nearest code; otherwise at random */
    int32_t mantissa;   /* number of mantissa bits if codes are floats; 0 if codes are integers */
};

/* The values of codes, as multiples of the scale times `unit`. For integers the value is code - half; the values range
 * from minus the scale to plus the scale. For floats, hvd_from_float8 gives the value. */
struct codes {
    float half, unit;
    int mantissa;
};

static struct codes codes_of(int64_t bits, int mantissa) {
    if (mantissa) return (struct codes){0, (float)(1 / (double)hvd_largest_float8(mantissa)), mantissa};
    const float steps = bits > 1 ? (float)((1 << bits) - 2) : 1;
    return (struct codes){steps / 2, (float)(2 / (double)steps), 0};
}

static void find_scales(const struct job *job, const float *x, int64_t size, float *scales) {
    for (int64_t i = 0; i < size; i += job->length) {
        const int64_t length = hvd_shorter(job->length, size - i);
        *scales++ = job->norms ? (float)sqrt(hvd_sum_of_squares(x + i, length))
                               : hvd_of_bits(hvd_largest_bits(x + i, length, 0));
    }
}

#define ONE 0x1p23f /* 1 in fixed point, with 23 fraction bits that are rounded at random */

/* Computes the codes of elements from `start` on that share a scale. NaN becomes the lowest code. */
static void quantise(
    const float *restrict x, int64_t start, int64_t length, float scale, float half, uint64_t key, uint8_t *restrict out
) {
    const float highest = half * ONE, factor = hvd_factor(scale, highest);
    const uint32_t zero = (uint32_t)highest;
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL) {
        float value = x[i] * factor;
        value = value > -highest ? value : -highest;
        value = value < highest ? value : highest;
        out[i] = (uint8_t)(((uint32_t)(int32_t)value + zero + (hvd_word(weyl, key) >> 9)) >> 23);
    }
}

#define TO_WHOLE 0x1.8p23f /* adding it to a number below 2**22 puts the nearest integer in the lowest bits */

static void round_to_nearest(
    const float *restrict x, int64_t length, float scale, float half, uint8_t *restrict out
) {
    const float factor = hvd_factor(scale, half);
    const uint32_t zero = (uint32_t)half;
    for (int64_t i = 0; i < length; i++) {
        float value = x[i] * factor;
        value = value > -half ? value : -half;
        value = value < half ? value : half;
        out[i] = (uint8_t)(hvd_bits(value + TO_WHOLE) + zero);
    }
}

HVD_INLINE void round_to_floats(
    const float *restrict x, int64_t start, int64_t length, float scale, int mantissa, int nearest, uint64_t key,
    uint8_t *restrict out
) {
    const float factor = hvd_factor(scale, hvd_largest_float8(mantissa));
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL)
        out[i] = hvd_to_float8(x[i] * factor, mantissa, nearest, nearest ? 0 : hvd_word(weyl, key) >> 9);
}

static void encode(
    const struct job *job, const float *x, int64_t start, int64_t length, float scale, float half, uint64_t key,
    uint8_t *out
) {
    if (job->mantissa == 3 && job->nearest) round_to_floats(x, start, length, scale, 3, 1, key, out);
    else if (job->mantissa == 3) round_to_floats(x, start, length, scale, 3, 0, key, out);
    else if (job->mantissa && job->nearest) round_to_floats(x, start, length, scale, 2, 1, key, out);
    else if (job->mantissa) round_to_floats(x, start, length, scale, 2, 0, key, out);
    else if (job->nearest) round_to_nearest(x, length, scale, half, out);
    else quantise(x, start, length, scale, half, key, out);
}

/* The value of a code, as a multiple of the unit. */
HVD_INLINE float decoded(uint8_t code, float half, int mantissa) {
    return mantissa ? hvd_from_float8(code, mantissa) : (float)code - half;
}

HVD_INLINE void subtract_all(
    float *restrict x, const uint8_t *restrict codes, int64_t length, float half, float unit, int mantissa
) {
    for (int64_t i = 0; i < length; i++) x[i] = hvd_left(x[i], decoded(codes[i], half, mantissa) * unit);
}

static void subtract(float *x, const uint8_t *codes, int64_t length, struct codes c, float unit) {
    if (c.mantissa == 3) subtract_all(x, codes, length, c.half, unit, 3);
    else if (c.mantissa) subtract_all(x, codes, length, c.half, unit, 2);
    else subtract_all(x, codes, length, c.half, unit, 0);
}

HVD_INLINE void add_up_all(
    float *restrict sum, const uint8_t *restrict codes, int64_t length, float half, float unit, int mantissa, int add
) {
    if (add)
        for (int64_t i = 0; i < length; i++) sum[i] += decoded(codes[i], half, mantissa) * unit;
    else
        for (int64_t i = 0; i < length; i++) sum[i] = decoded(codes[i], half, mantissa) * unit;
}

static void add_up(float *sum, const uint8_t *codes, int64_t length, struct codes c, float unit, int add) {
    if (c.mantissa == 3) add_up_all(sum, codes, length, c.half, unit, 3, add);
    else if (c.mantissa) add_up_all(sum, codes, length, c.half, unit, 2, add);
    else add_up_all(sum, codes, length, c.half, unit, 0, add);
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + job->first + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const struct codes c = codes_of(s->count, job->mantissa);
    float *scales = (float *)(void *)(job->payload + s->scales);
    uint8_t codes[HVD_GROUP + 8];
    /* If gradients have 16 bits and nothing is kept, x is computed again. This takes less time than writing and reading
     * x. */
    const int made = job->known && !hvd_made_once(job->bucket, s);
    float room[HVD_BLOCK];
    uint32_t largest = 0;
    for (int64_t start = task->start; start < task->start + task->length; start += HVD_BLOCK) {
        const int64_t end = hvd_shorter(start + HVD_BLOCK, task->start + task->length);
        const float *x = made ? hvd_made(s, start) : hvd_x_once(job->bucket, s, start, end - start, room, &largest);
        if (!job->known) find_scales(job, x, end - start, scales + start / job->length);
        for (int64_t group = start; group < end; group += HVD_GROUP) {
            const int64_t length = hvd_shorter(HVD_GROUP, end - group);
            hvd_ask_ahead(s, group);
            for (int64_t from = group, to; from < group + length; from = to) {
                const int64_t place = from / job->length;
                to = hvd_shorter((place + 1) * job->length, group + length);
                uint8_t *mine = codes + (from - group);
                encode(job, x + (from - start), from, to - from, scales[place], c.half, s->key, mine);
                if (job->bucket->keeps) subtract(s->x + from, mine, to - from, c, scales[place] * c.unit);
            }
            memset(codes + length, 0, 8);
            hvd_pack(codes, job->payload + s->codes, s->size, group, length, (int)s->count, 0);
        }
    }
    if (!job->known) task->counts[0] = largest >= HVD_INFINITE;
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const struct codes c = codes_of(s->count, job->mantissa);
    const int64_t end = task->start + task->length;
    uint8_t codes[HVD_GROUP + 8];
    float sum[HVD_GROUP];
    uint32_t largest = 0;
    for (int64_t group = task->start; group < end; group += HVD_GROUP) {
        const int64_t length = hvd_shorter(HVD_GROUP, end - group);
        for (int64_t rank = 0; rank < job->ranks; rank++) {
            uint8_t *payload = (uint8_t *)job->payloads + rank * job->row;
            const float *scales = (const float *)(const void *)(payload + s->scales);
            hvd_pack(codes, payload + s->codes, s->size, group, length, (int)s->count, 1);
            for (int64_t from = group, to; from < group + length; from = to) {
                const int64_t place = from / job->length;
                to = hvd_shorter((place + 1) * job->length, group + length);
                const float unit = scales[place] * c.unit;
                add_up(sum + (from - group), codes + (from - group), to - from, c, unit, rank > 0);
            }
        }
        largest = hvd_mean(sum, length, job->ranks, largest);
        largest = hvd_put(job->bucket, s, group, length, sum, job->large, largest);
    }
    hvd_fence();
    task->counts[0] = largest >= HVD_INFINITE;
}

/* Computes x of a piece, and the scales that begin in the piece. */
static void find_scales_of_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float *scales = (float *)(void *)(job->payload + s->scales);
    const int64_t first = (task->start + job->length - 1) / job->length;
    const int64_t end = (task->start + task->length + job->length - 1) / job->length;
    if (first < end) {
        const int64_t start = first * job->length;
        find_scales(job, hvd_made(s, start), hvd_shorter(end * job->length, s->size) - start, scales + first);
    }
}

/* Encodes all tensors, with one scale for every `length` elements. */
static int32_t encode_runs(struct job *job) {
    hvd_bucket *bucket = (hvd_bucket *)job->bucket;
    if (HVD_BLOCK % job->length != 0) {
        HVD_NAME(make_x)(bucket);
        hvd_parallel(bucket->threads, bucket->task_count, find_scales_of_piece, job);
        job->known = 1;
    }
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(qsgd_encode)(hvd_bucket *bucket, int64_t length, uint8_t *payload) {
    struct job job = {.bucket = bucket, .payload = payload, .length = length, .norms = 1};
    return encode_runs(&job);
}

int32_t HVD_NAME(blocks_encode)(
    hvd_bucket *bucket, int64_t length, int32_t mantissa, int32_t nearest, uint8_t *payload
) {
    struct job job = {.bucket = bucket, .payload = payload, .length = length};
    job.mantissa = mantissa, job.nearest = nearest;
    return encode_runs(&job);
}

/* Computes x of a piece, the sum of squares of x, and its largest magnitude. */
static void measure_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + job->first + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    float room[HVD_BLOCK];
    uint32_t largest = 0;
    task->sums[0] = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK) {
        const int64_t length = hvd_shorter(HVD_BLOCK, task->length - done);
        const float *x = hvd_x_once(job->bucket, s, task->start + done, length, room, &largest);
        task->sums[0] += hvd_sum_of_squares(x, length);
    }
    task->counts[0] = largest >= HVD_INFINITE;
    task->counts[1] = largest;
}

/* Finds the scale of the tensor whose pieces begin at number `task`. Returns the number after its last piece. */
static int64_t find_scale(const hvd_bucket *bucket, int64_t task, double clip, uint8_t *payload) {
    const int64_t number = bucket->tasks[task].segment;
    const hvd_segment *s = bucket->segments + number;
    double squares = 0;
    uint32_t largest = 0;
    for (; task < bucket->task_count && bucket->tasks[task].segment == number; task++) {
        const uint32_t own = (uint32_t)bucket->tasks[task].counts[1];
        largest = own > largest ? own : largest;
        squares += bucket->tasks[task].sums[0];
    }
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    if (clip > 0 && clip < (double)INFINITY) {
        const float bound = (float)sqrt(squares) * (float)(clip / sqrt((double)s->size));
        scale = bound < scale ? bound : scale;
    }
    memcpy(payload + s->scales, &scale, sizeof scale);
    return task;
}

#define TOGETHER (1 << 19) /* number of elements that are measured and then encoded while they are in a cache */

int32_t HVD_NAME(terngrad_encode)(hvd_bucket *bucket, double clip, uint8_t *payload) {
    struct job job = {.bucket = bucket, .payload = payload, .length = INT64_MAX, .known = 1};
    for (int64_t end; job.first < bucket->task_count; job.first = end) {
        const hvd_task *tasks = bucket->tasks;
        int64_t elements = 0;
        for (end = job.first; end < bucket->task_count; end++) {
            const int begins = tasks[end].start == 0;
            if (begins && end > job.first && elements + bucket->segments[tasks[end].segment].size > TOGETHER) break;
            elements += tasks[end].length;
        }
        hvd_parallel(bucket->threads, end - job.first, measure_piece, &job);
        for (int64_t task = job.first; task < end;) task = find_scale(bucket, task, clip, payload);
        hvd_parallel(bucket->threads, end - job.first, encode_piece, &job);
    }
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

static int32_t decode_runs(
    hvd_bucket *bucket, int64_t length, int32_t mantissa, const uint8_t *payloads, int64_t ranks, int64_t row
) {
    struct job job = {.bucket = bucket, .payloads = payloads, .ranks = ranks, .row = row, .length = length};
    job.large = hvd_is_large(bucket), job.mantissa = mantissa;
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

int32_t HVD_NAME(multiples_decode)(
    hvd_bucket *bucket, int64_t length, const uint8_t *payloads, int64_t ranks, int64_t row
) {
    return decode_runs(bucket, length, 0, payloads, ranks, row);
}

int32_t HVD_NAME(float8_decode)(
    hvd_bucket *bucket, int64_t length, int32_t mantissa, const uint8_t *payloads, int64_t ranks, int64_t row
) {
    return decode_runs(bucket, length, mantissa, payloads, ranks, row);
}

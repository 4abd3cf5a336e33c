/* Global-QSGD. Elements become integer multiples of a fraction of the largest magnitude of all ranks. The integers are
 * digits of words, and words can be added.
 *
 * Digits have `count` bits. Word i of a tensor of n words holds the elements i, i + n, i + 2 n, ..., with the first one
 * in its lowest digit. A tensor's words begin at word `codes`. */
#include "make.h"
#include "put.h"
#include "quant.h"

#define CHUNK 512 /* number of words */

struct job {
    const hvd_bucket *bucket;
    const float *scales;
    uint32_t *words;
    int64_t ranks;
};

/* Describes the words of a piece and their digits. */
struct digits {
    int64_t words, first, end; /* words: of the tensor; first, end: of the piece */
    int bits, fields;
    int32_t levels; /* levels of one rank */
};

static struct digits digits_of(const hvd_segment *s, const hvd_task *task, int64_t ranks) {
    struct digits d = {.bits = (int)s->count, .fields = 32 / (int)s->count};
    const int64_t end = task->start + task->length;
    d.words = (s->size + d.fields - 1) / d.fields;
    d.first = task->start / d.fields;
    d.end = end == s->size ? d.words : end / d.fields;
    d.levels = (int32_t)(((1 << d.bits) - 1) / (2 * ranks));
    return d;
}

static void measure_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    uint32_t largest = 0;
    for (int64_t done = 0; done < task->length; done += HVD_BLOCK)
        hvd_x(job->bucket, s, task->start + done, hvd_shorter(HVD_BLOCK, task->length - done), &largest);
    task->counts[0] = largest >= HVD_INFINITE;
    task->counts[1] = largest;
}

int32_t HVD_NAME(globalqsgd_measure)(hvd_bucket *bucket, float *maxima) {
    struct job job = {.bucket = bucket};
    hvd_parallel(bucket->threads, bucket->task_count, measure_piece, &job);
    memset(maxima, 0, (size_t)bucket->segment_count * sizeof *maxima);
    for (const hvd_task *task = bucket->tasks; task < bucket->tasks + bucket->task_count; task++) {
        const uint32_t own = (uint32_t)task->counts[1];
        if (own > hvd_bits(maxima[task->segment])) memcpy(maxima + task->segment, &own, sizeof own);
    }
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

/* Adds one digit to each word. NaN becomes the lowest digit. */
static void add_digit(
    const float *restrict x, int64_t start, int64_t length, float factor, float levels, uint64_t key, int shift,
    uint32_t *restrict words, int32_t *restrict digits
) {
    uint32_t weyl = hvd_weyl(start, key);
    for (int64_t i = 0; i < length; i++, weyl += HVD_WEYL) {
        float value = x[i] * factor + (float)(int32_t)(hvd_word(weyl, key) >> 8) * 0x1p-24f;
        value = value > -levels ? value : -levels;
        value = value < levels ? value : levels;
        const int32_t truncated = (int32_t)value;
        digits[i] = truncated - ((float)truncated > value);
        words[i] += (uint32_t)digits[i] << shift;
    }
}

static void encode_piece(void *context, int64_t number) {
    const struct job *job = context;
    const hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const struct digits d = digits_of(s, task, job->ranks);
    const float scale = job->scales[task->segment], levels = (float)d.levels;
    const float factor = hvd_factor(scale, levels), unit = scale * (float)(1 / (double)d.levels);
    int32_t digits[CHUNK];
    for (int64_t first = d.first; first < d.end; first += CHUNK) {
        uint32_t *words = job->words + s->codes + first;
        const int64_t count = hvd_shorter(CHUNK, d.end - first);
        memset(words, 0, (size_t)count * sizeof *words);
        for (int field = 0; field < d.fields; field++) {
            const int64_t start = field * d.words + first, length = hvd_shorter(count, s->size - start);
            if (length <= 0) break;
            add_digit(hvd_made(s, start), start, length, factor, levels, s->key, field * d.bits, words, digits);
            if (job->bucket->keeps)
                for (int64_t i = 0; i < length; i++)
                    s->x[start + i] = hvd_left(s->x[start + i], (float)digits[i] * unit);
        }
    }
}

void HVD_NAME(globalqsgd_encode)(hvd_bucket *bucket, const float *scales, int64_t ranks, int32_t *words) {
    struct job job = {.bucket = bucket, .scales = scales, .ranks = ranks, .words = (uint32_t *)words};
    hvd_parallel(bucket->threads, bucket->task_count, encode_piece, &job);
}

static void decode_piece(void *context, int64_t number) {
    const struct job *job = context;
    hvd_task *task = job->bucket->tasks + number;
    const hvd_segment *s = job->bucket->segments + task->segment;
    const struct digits d = digits_of(s, task, job->ranks);
    const uint32_t largest = (uint32_t)(d.levels * job->ranks), mask = (1u << d.bits) - 1;
    const float unit = job->scales[task->segment] * (float)(1 / (double)largest);
    uint32_t found = 0, offset = 0;
    /* `largest` is added to each digit. All digits are then positive, and each has bits of its own. */
    for (int field = 0; field < d.fields; field++) offset += largest << (field * d.bits);
    for (int64_t first = d.first; first < d.end; first += CHUNK)
        for (int field = 0; field < d.fields; field++) {
            const int64_t start = field * d.words + first;
            const int64_t length = hvd_shorter(hvd_shorter(CHUNK, d.end - first), s->size - start);
            if (length <= 0) break;
            const uint32_t *restrict words = job->words + s->codes + first;
            float *restrict result = s->result + start;
            for (int64_t i = 0; i < length; i++) {
                const uint32_t digit = (words[i] + offset) >> (field * d.bits) & mask;
                result[i] = (float)((int32_t)digit - (int32_t)largest) * unit;
            }
            found = hvd_largest_bits(result, length, found);
            found = hvd_put(job->bucket, s, start, length, result, 0, found);
        }
    task->counts[0] = found >= HVD_INFINITE;
}

int32_t HVD_NAME(globalqsgd_decode)(hvd_bucket *bucket, const float *scales, int64_t ranks, const int32_t *words) {
    struct job job = {.bucket = bucket, .scales = scales, .ranks = ranks, .words = (uint32_t *)words};
    hvd_parallel(bucket->threads, bucket->task_count, decode_piece, &job);
    return hvd_any_found(bucket->tasks, bucket->task_count);
}

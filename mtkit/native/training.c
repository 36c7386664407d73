/* What training on a CPU does besides matrix products: attention in short sentences, LayerNorm, and dropout with the sum that follows it, forward and
 * backward, and the softmax of the loss, each in one pass over memory. `training.py` calls them.
 *
 * Every function divides its rows among the threads that torch has (OpenMP), with the same result for any number of them. Numbers are fp32, or bf16
 * where `is_half` says so; all arithmetic is fp32.
 *
 * Shapes: B sentences, T queries and S keys of each, H heads, C channels of a head, a multiple of 16, D = H C, N rows.
 */

#include <stdlib.h>

#include "vector.h"

/* Whether rows are divided among threads. */
long has_threads(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* e^(x - top) for x <= top, and 0, not nearly 0, far below. */
INLINE vec exp_below(vec x, float top)
{
    const vec distance = x - top;
    return choose(distance < broadcast(-87.0f), broadcast(0.0f), exp_of_negative(distance)); /* NaN is kept */
}

/* ---- attention ---- */

/* Sentences in one of two layouts: row b T + t of q, out and the gradients, row b S + s of k and v; "ld" is the distance of two rows in numbers. */
struct attention {
    long sentences, queries, keys, heads, channels, is_half;
    const void *q, *k, *v;
    long ldq, ldkv;
    const uint8_t *mask; /* whether query t of sentence b attends to key s: mask[b * mask_b + t * mask_t + s * mask_s] */
    long mask_b, mask_t, mask_s;
    float *weights; /* [B, H, T, S'], S' is S rounded up to 16; behind the keys they are 0 */
    void *out;
    long ldo;
};

/* Rows of a head as fp32 [n, C], or, if that is NULL, as columns [C, n'], n' is n rounded up to 16, 0 where there are no rows. */
INLINE void take_head(const void *x, long ld, long n, long channels, float *rows, float *columns, const int is_half)
{
    const long padded = round_up(n, 16);
    if (rows != NULL)
        for (long i = 0; i < n; i++)
            for (long c = 0; c < channels; c += LANES)
                store(rows + i * channels + c, load_from(x, i * ld + c, is_half));
    else
        for (long i = 0; i < padded; i += LANES)
            for (long c = 0; c < channels; c += LANES) {
                vec square[LANES];
                for (long j = 0; j < LANES; j++)
                    square[j] = i + j < n ? load_from(x, (i + j) * ld + c, is_half) : broadcast(0.0f);
                transpose(square);
                for (long j = 0; j < LANES; j++)
                    store(columns + (c + j) * padded + i, square[j]);
            }
}

/* out [rows, columns] = a [rows, inner] b [inner, columns], for a multiple of LANES columns. Element (i, k) of a lies at i * lda + k * stride_a. */
INLINE void multiply_small(const float *a, long lda, long stride_a, const float *b, long ldb, long rows, long inner, long columns, float *out, long ldo)
{
    for (long i = 0; i < rows;) {
        const long together = rows - i >= 4 ? 4 : 1;
        for (long c = 0; c < columns;) {
            const long width = columns - c >= 2 * LANES ? 2 : 1;
            const float *left = a + i * lda;
            float *target = out + i * ldo + c;
            if (together == 4 && width == 2)
                multiply_some(4, 2, left, lda, stride_a, b, c, ldb, inner, NULL, target, ldo, 0);
            else if (together == 4)
                multiply_some(4, 1, left, lda, stride_a, b, c, ldb, inner, NULL, target, ldo, 0);
            else if (width == 2)
                multiply_some(1, 2, left, lda, stride_a, b, c, ldb, inner, NULL, target, ldo, 0);
            else
                multiply_some(1, 1, left, lda, stride_a, b, c, ldb, inner, NULL, target, ldo, 0);
            c += width * LANES;
        }
        i += together;
    }
}

INLINE const void *moved(const void *x, long count, int is_half) { return (const char *)x + count * size_of(is_half); }

/* Numbers of room that a thread needs. */
static long room_of(const struct attention *a)
{
    const long t = round_up(a->queries, 16), s = round_up(a->keys, 16), longest = t > s ? t : s;
    return 5 * longest * a->channels + t * s;
}

INLINE void store_head(void *x, long ld, long n, long channels, const float *rows, float factor, const int is_half)
{
    for (long i = 0; i < n; i++)
        for (long c = 0; c < channels; c += LANES)
            store_to(x, i * ld + c, load(rows + i * channels + c) * factor, is_half);
}

INLINE void attend_head(const struct attention *a, long b, long h, float *room, const int is_half)
{
    const long t = a->queries, s = a->keys, c = a->channels, padded = round_up(s, 16), longest = round_up(t > s ? t : s, 16);
    float *q = room, *keys = q + longest * c, *v = keys + longest * c, *out = v + longest * c;
    float *weights = a->weights + (b * a->heads + h) * t * padded;
    const float scale = 1.0f / sqrtf((float)c);
    take_head(moved(a->q, b * t * a->ldq + h * c, is_half), a->ldq, t, c, q, NULL, is_half);
    take_head(moved(a->k, b * s * a->ldkv + h * c, is_half), a->ldkv, s, c, NULL, keys, is_half);
    take_head(moved(a->v, b * s * a->ldkv + h * c, is_half), a->ldkv, s, c, v, NULL, is_half);
    multiply_small(q, c, 1, keys, padded, t, c, padded, weights, padded);
    for (long i = 0; i < t; i++) {
        float *row = weights + i * padded;
        const uint8_t *mask = a->mask + b * a->mask_b + i * a->mask_t;
        vec highest = broadcast(-INFINITY), sum = {0};
        for (long j = 0; j < padded; j += LANES) {
            ints seen = {0};
            if (a->mask_s == 1 && j + LANES <= s)
                seen = load_bytes(mask + j);
            else
                for (long l = 0; l < LANES && j + l < s; l++)
                    seen[l] = mask[(j + l) * a->mask_s];
            /* the lowest numbers instead of -inf: a row without any True stays free of NaN */
            const vec unseen = choose(lane < (int32_t)(s - j), broadcast(-3.0e38f), broadcast(-INFINITY));
            const vec score = choose(seen != 0, load(row + j) * scale, unseen);
            store(row + j, score);
            highest = larger(highest, score);
        }
        const float top = largest_of(highest);
        for (long j = 0; j < padded; j += LANES) {
            const vec e = exp_below(load(row + j), top);
            store(row + j, e);
            sum += e;
        }
        const float factor = 1.0f / sum_of(sum);
        for (long j = 0; j < padded; j += LANES)
            store(row + j, load(row + j) * factor);
    }
    multiply_small(weights, padded, 1, v, c, t, s, c, out, c);
    store_head((void *)moved(a->out, b * t * a->ldo + h * c, is_half), a->ldo, t, c, out, 1.0f, is_half);
}

/* Gradients of q, k and v, from that of out. */
struct attention_gradients {
    const void *out;
    long ldo;
    void *q, *k, *v;
    long ldq, ldkv;
};

INLINE void attend_head_backward(const struct attention *a, const struct attention_gradients *g, long b, long h, float *room, const int is_half)
{
    const long t = a->queries, s = a->keys, c = a->channels, padded = round_up(s, 16), longest = round_up(t > s ? t : s, 16);
    float *q = room, *k = q + longest * c, *values = k + longest * c, *out = values + longest * c, *result = out + longest * c;
    float *scores = result + longest * c;
    const float *weights = a->weights + (b * a->heads + h) * t * padded;
    const float scale = 1.0f / sqrtf((float)c);
    take_head(moved(g->out, b * t * g->ldo + h * c, is_half), g->ldo, t, c, out, NULL, is_half);
    /* of the values: weights^T out */
    multiply_small(weights, 1, padded, out, c, s, t, c, result, c);
    store_head((void *)moved(g->v, b * s * g->ldkv + h * c, is_half), g->ldkv, s, c, result, 1.0f, is_half);
    /* of the scores: weights * (out v^T - its mean under the weights) */
    take_head(moved(a->v, b * s * a->ldkv + h * c, is_half), a->ldkv, s, c, NULL, values, is_half);
    multiply_small(out, c, 1, values, padded, t, c, padded, scores, padded);
    for (long i = 0; i < t; i++) {
        vec sum = {0};
        for (long j = 0; j < padded; j += LANES)
            sum += load(scores + i * padded + j) * load(weights + i * padded + j);
        const float mean = sum_of(sum);
        for (long j = 0; j < padded; j += LANES)
            store(scores + i * padded + j, (load(scores + i * padded + j) - mean) * load(weights + i * padded + j));
    }
    /* of the queries: scores k; of the keys: scores^T q */
    take_head(moved(a->k, b * s * a->ldkv + h * c, is_half), a->ldkv, s, c, k, NULL, is_half);
    multiply_small(scores, padded, 1, k, c, t, s, c, result, c);
    store_head((void *)moved(g->q, b * t * g->ldq + h * c, is_half), g->ldq, t, c, result, scale, is_half);
    take_head(moved(a->q, b * t * a->ldq + h * c, is_half), a->ldq, t, c, q, NULL, is_half);
    multiply_small(scores, 1, padded, q, c, s, t, c, result, c);
    store_head((void *)moved(g->k, b * s * g->ldkv + h * c, is_half), g->ldkv, s, c, result, scale, is_half);
}

INLINE void do_head(const struct attention *a, const struct attention_gradients *g, long b, long h, float *room, const int is_half)
{
    if (g == NULL)
        attend_head(a, b, h, room, is_half);
    else
        attend_head_backward(a, g, b, h, room, is_half);
}

/* Forward, or with gradients backward. Returns 0, or -1 if there is no memory. */
long attention(const struct attention *a, const struct attention_gradients *g)
{
    long failed = 0;
#pragma omp parallel reduction(+ : failed)
    {
        float *room = malloc(sizeof(float) * room_of(a));
        failed = room == NULL;
#pragma omp for
        for (long head = 0; head < a->sentences * a->heads; head++) {
            if (room == NULL)
                continue;
            if (a->is_half)
                do_head(a, g, head / a->heads, head % a->heads, room, 1);
            else
                do_head(a, g, head / a->heads, head % a->heads, room, 0);
        }
        free(room);
    }
    return -failed;
}

/* ---- LayerNorm ---- */

#define ROWS_OF_CHUNK 64 /* rows whose sums for the weight and the bias are formed by one thread */

/* y = (x - mean) / deviation * weight + bias for each row of x, fp32 [N, D]; y is bf16 with is_half. Keeps mean and 1 / deviation of each row. */
void layer_norm_forward(const float *x, const float *weight, const float *bias, float epsilon, long rows, long d, void *y, float *mean, float *factor,
                        long is_half)
{
#pragma omp parallel for
    for (long r = 0; r < rows; r++) {
        const float *row = x + r * d;
        vec sum = {0}, squares = {0};
        for (long i = 0; i < d; i += LANES)
            sum += load(row + i);
        mean[r] = sum_of(sum) / (float)d;
        for (long i = 0; i < d; i += LANES)
            squares += (load(row + i) - mean[r]) * (load(row + i) - mean[r]);
        factor[r] = 1.0f / sqrtf(sum_of(squares) / (float)d + epsilon);
        for (long i = 0; i < d; i += LANES)
            store_to(y, r * d + i, (load(row + i) - mean[r]) * factor[r] * load(weight + i) + load(bias + i), (int)is_half);
    }
}

/* Gradients of x, fp32 [N, D], and of weight and bias, [chunks of ROWS_OF_CHUNK rows, D] each, to be summed. */
void layer_norm_backward(const void *grad_y, const float *x, const float *weight, const float *mean, const float *factor, long rows, long d, float *grad_x,
                         float *grad_weight, float *grad_bias, long is_half)
{
#pragma omp parallel for
    for (long chunk = 0; chunk < (rows + ROWS_OF_CHUNK - 1) / ROWS_OF_CHUNK; chunk++) {
        float *dw = grad_weight + chunk * d, *db = grad_bias + chunk * d;
        memset(dw, 0, sizeof(float) * d);
        memset(db, 0, sizeof(float) * d);
        for (long r = chunk * ROWS_OF_CHUNK; r < rows && r < (chunk + 1) * ROWS_OF_CHUNK; r++) {
            const float *row = x + r * d;
            vec sum = {0}, product = {0};
            for (long i = 0; i < d; i += LANES) {
                const vec g = load_from(grad_y, r * d + i, (int)is_half), normed = (load(row + i) - mean[r]) * factor[r];
                store(dw + i, load(dw + i) + g * normed);
                store(db + i, load(db + i) + g);
                const vec weighted = g * load(weight + i);
                sum += weighted;
                product += weighted * normed;
            }
            const float mean_sum = sum_of(sum) / (float)d, mean_product = sum_of(product) / (float)d;
            for (long i = 0; i < d; i += LANES) {
                const vec g = load_from(grad_y, r * d + i, (int)is_half), normed = (load(row + i) - mean[r]) * factor[r];
                store(grad_x + r * d + i, (g * load(weight + i) - mean_sum - normed * mean_product) * factor[r]);
            }
        }
    }
}

/* ---- dropout ---- */

#define NUMBERS_OF_CHUNK 4096

INLINE vec keep(vec value, const uint8_t *bytes, long threshold, float scale)
{
    return choose(load_bytes(bytes) < (int32_t)threshold, broadcast(0.0f), value * scale);
}

/* out = x + change * scale where the random byte is not below the threshold, and x elsewhere; x and out fp32, n is a multiple of 16. */
void dropout_add_forward(const float *x, const void *change, const uint8_t *bytes, long threshold, float scale, long n, float *out, long is_half)
{
#pragma omp parallel for
    for (long start = 0; start < n; start += NUMBERS_OF_CHUNK)
        for (long i = start; i < n && i < start + NUMBERS_OF_CHUNK; i += LANES)
            store(out + i, load(x + i) + keep(load_from(change, i, (int)is_half), bytes + i, threshold, scale));
}

/* The gradient of change, from that of out, fp32. */
void dropout_add_backward(const float *grad_out, const uint8_t *bytes, long threshold, float scale, long n, void *grad_change, long is_half)
{
#pragma omp parallel for
    for (long start = 0; start < n; start += NUMBERS_OF_CHUNK)
        for (long i = start; i < n && i < start + NUMBERS_OF_CHUNK; i += LANES)
            store_to(grad_change, i, keep(load(grad_out + i), bytes + i, threshold, scale), (int)is_half);
}

/* ---- the softmax of the loss ---- */

/* Numbers first .. first + LANES - 1 of a row; behind its end -inf. */
INLINE vec load_logits(const void *row, long first, long columns, const int is_half)
{
    if (first + LANES <= columns)
        return load_from(row, first, is_half);
    float some[LANES];
    for (long i = 0; i < LANES; i++) {
        const uint32_t half = is_half && first + i < columns ? (uint32_t)((const uint16_t *)row)[first + i] << 16 : 0;
        some[i] = -INFINITY;
        if (is_half && first + i < columns)
            memcpy(some + i, &half, 4);
        else if (first + i < columns)
            some[i] = ((const float *)row)[first + i];
    }
    return load(some);
}

INLINE void store_logits(void *row, long first, long columns, vec value, const int is_half)
{
    if (first + LANES <= columns) {
        store_to(row, first, value, is_half);
        return;
    }
    float some[LANES];
    store_to(some, 0, value, is_half);
    memcpy((char *)row + first * size_of(is_half), some, (columns - first) * size_of(is_half));
}

INLINE void softmax_row(void *row, long target, float epsilon, long columns, float *log_sum, float *target_logit, const int is_half)
{
    const float logit = load_logits(row, target / LANES * LANES, columns, is_half)[target % LANES];
    vec highest = broadcast(-INFINITY), sums[2] = {{0}};
    for (long i = 0; i < columns; i += LANES)
        highest = larger(highest, load_logits(row, i, columns, is_half));
    const float top = largest_of(highest);
    for (long i = 0; i < columns; i += 2 * LANES) {
        sums[0] += exp_below(load_logits(row, i, columns, is_half), top);
        if (i + LANES < columns)
            sums[1] += exp_below(load_logits(row, i + LANES, columns, is_half), top);
    }
    const float sum = sum_of(sums[0] + sums[1]), factor = 1.0f / sum;
    *log_sum = top + logf(sum);
    *target_logit = logit;
    for (long i = 0; i < columns; i += LANES) {
        vec p = exp_below(load_logits(row, i, columns, is_half), top) * factor;
        if (target - i >= 0 && target - i < LANES)
            p[target - i] -= 1.0f - epsilon;
        store_logits(row, i, columns, p, is_half);
    }
}

/* Of each row of logits, dense [N, columns], the softmax, less 1 - epsilon at its target, in its place; and the logarithm of the sum of the exponentials,
 * and the target's logit. */
void softmax_less_target(void *logits, const int64_t *target, float epsilon, long rows, long columns, float *log_sum, float *target_logit, long is_half)
{
#pragma omp parallel for
    for (long r = 0; r < rows; r++) {
        void *row = (char *)logits + r * columns * size_of((int)is_half);
        if (is_half)
            softmax_row(row, target[r], epsilon, columns, log_sum + r, target_logit + r, 1);
        else
            softmax_row(row, target[r], epsilon, columns, log_sum + r, target_logit + r, 0);
    }
}

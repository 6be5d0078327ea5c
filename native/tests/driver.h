/* Runs LLVMFuzzerTestOneInput without a fuzzing compiler:  PROGRAM SECONDS SEED [FILE...]
 * Files are replayed first. Inputs are random bytes shaped by `shape`, which the including file defines; a failure prints its seed by
 * what the sanitizer says about the run's arguments, and the input can be made again from seed and number. */
#ifndef DSEC_DRIVER_H
#define DSEC_DRIVER_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifndef DSEC_LIBFUZZER

static uint64_t random_state;

static uint64_t random_u64(void) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1d;
}

static uint64_t below(uint64_t bound) { return random_u64() % bound; }

/* Makes one input; returns its size. */
static size_t shape(uint8_t *out, size_t capacity);

int main(int argc, char **argv) {
    static uint8_t input[1 << 18];
    if (argc < 3) return 2;
    double seconds = strtod(argv[1], NULL);
    uint64_t seed = strtoull(argv[2], NULL, 10), count = 0;
    for (int i = 3; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) return 2;
        LLVMFuzzerTestOneInput(input, fread(input, 1, sizeof input, file));
        fclose(file);
    }
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        random_state = (seed + 1) * 0x9e3779b97f4a7c15 + count;
        for (int i = 0; i < 4; i++) random_u64();
        size_t size = shape(input, sizeof input);
        uint8_t *exact = malloc(size ? size : 1); /* so that a sanitizer sees a step beyond the end */
        memcpy(exact, input, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
        count++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9 < seconds);
    printf("%llu inputs\n", (unsigned long long)count);
    return 0;
}

#endif
#endif

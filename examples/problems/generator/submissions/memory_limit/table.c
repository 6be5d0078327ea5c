#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    int n;
    if (scanf("%d", &n) != 1) return 1;
    uint64_t *x = malloc((n + 1) * sizeof *x);
    x[0] = 1;
    for (int i = 0; i < n; i++) x[i + 1] = (uint32_t)(69069 * x[i] + 5);
    printf("%u\n", (unsigned)x[n]);
    return 0;
}

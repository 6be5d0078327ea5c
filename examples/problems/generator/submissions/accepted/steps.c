#include <stdint.h>
#include <stdio.h>

int main(void) {
    int n;
    uint32_t x = 1;
    if (scanf("%d", &n) != 1) return 1;
    while (n--) x = 69069 * x + 5;
    printf("%u\n", x);
    return 0;
}

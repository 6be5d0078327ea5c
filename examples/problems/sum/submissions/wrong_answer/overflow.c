#include <stdint.h>
#include <stdio.h>

int main(void) {
    int a, b;
    if (scanf("%d %d", &a, &b) != 2) return 1;
    printf("%d\n", (int16_t)(a + b));
    return 0;
}

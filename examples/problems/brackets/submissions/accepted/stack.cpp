#include <iostream>
#include <string>

int main() {
    std::string line, stack;
    std::cin >> line;
    for (char each : line) {
        if (each == '(' || each == '[') {
            stack.push_back(each);
        } else {
            if (stack.empty() || stack.back() != (each == ')' ? '(' : '[')) {
                std::cout << "no\n";
                return 0;
            }
            stack.pop_back();
        }
    }
    std::cout << (stack.empty() ? "yes\n" : "no\n");
}

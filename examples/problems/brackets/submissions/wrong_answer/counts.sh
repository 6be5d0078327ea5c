read -r line
opening="${line//[^(\[]/}"
[ $((2 * ${#opening})) -eq ${#line} ] && echo yes || echo no

export LC_ALL=C
tr -s '[:space:]' '\n' | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 1 | tr -s ' ' | cut -d ' ' -f 3

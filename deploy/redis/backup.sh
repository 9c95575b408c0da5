#!/bin/sh
# Write a consistent copy of a running Redis to BACKUPS/redis-TIME.rdb and keep the last KEEP of them:
#
#     backup.sh SECRETS BACKUPS KEEP [OPTION OF redis-cli…]
#
# Redis forks and sends its data as to a replica. A copy gets its name once it is whole and checked.
set -eu
umask 077

secrets=$1 backups=$2 keep=$3
shift 3
[ "$keep" -ge 1 ]
REDISCLI_AUTH=$(tr -d '[:space:]' <"$secrets/backup_password")
export REDISCLI_AUTH
draft=$backups/.draft.rdb
rm -f "$draft"
redis-cli "$@" --user backup --no-auth-warning --rdb "$draft"
unset REDISCLI_AUTH
redis-check-rdb "$draft" >&2
file=$backups/redis-$(date -u +%Y%m%dT%H%M%SZ).rdb
mv "$draft" "$file"
echo "$file: $(wc -c <"$file") bytes"

# Their names sort by age.
find "$backups" -maxdepth 1 -name 'redis-*.rdb' | sort -r | tail -n "+$((keep + 1))" | while read -r old; do
    rm "$old"
    echo "removed $old"
done

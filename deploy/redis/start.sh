#!/bin/sh
# Start Redis with the passwords of files, so that none is on a command line:
#
#     start.sh SECRETS CONF [OPTION…]
#
# SECRETS/redis_password is that of clients, which may neither change, stop, dump nor empty the server;
# SECRETS/backup_password that of the user "backup", which may only copy it. CONF is written anew.
# There are no save points: the data is in the append-only file alone, and a failed snapshot stops nothing.
set -eu
umask 077

digest() {
    if [ ! -s "$1" ]; then
        echo "no password in $1" >&2
        exit 1
    fi
    tr -d '[:space:]' <"$1" | sha256sum | cut -d ' ' -f 1
}

secrets=$1 conf=$2
shift 2
clients=$(digest "$secrets/redis_password")
backup=$(digest "$secrets/backup_password")
cat >"$conf" <<CONF
user default reset on #$clients ~* +@all -@admin -@dangerous +info
user backup reset on #$backup +ping +info +replconf +sync +psync
save ""
CONF
exec redis-server "$conf" "$@"

#!/bin/sh
# Give a stopped Redis the data of a backup:
#
#     restore.sh BACKUP DATA
#
# BACKUP is a file of backup.sh, or a folder, of which the newest is taken. What DATA had moves to
# DATA/before-restore-TIME. The copy becomes the base of the append-only file, which Redis loads at its start;
# it would ignore a dump.rdb.
set -eu
umask 077

backup=$1 data=$2
if [ -d "$backup" ]; then
    backup=$(find "$backup" -maxdepth 1 -name 'redis-*.rdb' | sort | tail -n 1)
fi
if [ ! -s "$backup" ]; then
    echo "no backup in $1" >&2
    exit 1
fi
redis-check-rdb "$backup" >&2
draft=$data/.restored.aof
cp "$backup" "$draft"

aside=$data/before-restore-$(date -u +%Y%m%dT%H%M%SZ)
mkdir "$aside"
for name in appendonlydir appendonly.aof dump.rdb; do
    if [ -e "$data/$name" ]; then
        mv "$data/$name" "$aside/"
    fi
done
mv "$draft" "$data/appendonly.aof"
sync
echo "restored $backup; what was there is in $aside"

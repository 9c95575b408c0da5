"""The archive of the usage ledger: closed days as Parquet files in the blob store, and their index in Redis.

A day's rows go into a file, the file into the store, where it is read back and compared, and its entry into
the index; only then are the rows removed from Redis. Readers drop what both have. So an archiver may be
killed at any point: the next one removes from Redis what the index has, and moves the rest. The sums stay.

- `archive`: all parts together, for one process
- `archiver`: moves closed days out of Redis
- `caches`: open files, decoded row groups and indexes by id, bounded
- `columns`: rows as Arrow tables
- `erasure`: deletion by tenant
- `file_reader`: reads of files: pages, rows by id, sums
- `files`: files in the blob store, read and written in one thread
- `ledger`: the ledger of Redis and archive together
- `lease`: the right to write the archive
- `writer`: one file as it is written
"""

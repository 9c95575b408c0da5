"""Every Redis key and time to live of the shared state, in one place.

| key | type | holds |
|---|---|---|
| `hc:cluster` | string | ClusterConfig |
| `hc:probe` | - | never exists: a write that changes nothing checks that writes are accepted |
| `hc:incarnation` | string | id of this state, new after state was lost (registry/records/fence.py) |
| `hc:feed` | stream | one entry a change: field = kind of change, value = its JSON |
| `hc:functions` | hash | function name -> Function |
| `hc:versions` | hash | `name:version` -> FunctionVersion |
| `hc:secrets` | hash | function name -> FunctionSecrets, the values encrypted |
| `hc:last-versions` | hash | function name -> highest number ever assigned; outlives the function |
| `hc:epochs` | hash | node id -> latest epoch; outlives the node |
| `hc:nodes` | set | ids that may have a node record |
| `hc:node:<id>` | hash | `epoch`, `record`; expires when heartbeats stop |
| `hc:instances:<node>` | hash | instance id -> InstanceRecord; field "" = the epoch that they belong to |
| `hc:gateways` | set | ids that may have a load report |
| `hc:load:<gateway>` | string | DemandChanged; expires |
| `hc:scale:<token>` | string | a scale request that is in the feed already |
| `hc:casts` | set | ids that may have a cast |
| `hc:cast:<id>` | hash | `epoch`, `record`; `node <id>` -> brief CastProgress, `more <id>` -> CastDetails, |
| | | `part <id>`, `at <id>` -> epoch and time of these; expires |
| `hc:lives` | set | function versions that may have a live record |
| `hc:live:<name>:<version>` | hash | `epoch`, `serial`, `record`, `ttl` of a LiveRecord; expires |
| `hc:scaling:<name>` | string | ScalingRecord: the last decision on a function's instances; expires |
| `hc:lease:<name>` | hash | `holder`, and `beat`, new with each renewal; expires |
| `hc:lease-epochs` | hash | lease name -> latest epoch, and `name beats` -> beats so far |
| `hc:keys` | hash | key id -> ApiKey |
| `hc:bucket:<key id>` | hash | `at` (ms), `requests`, `tokens`: units used of the key's rates; expires |
| `hc:concurrency:<key id>` | sorted set | requests in progress by lease expiry (ms); expires |
| `hc:reserved:<key id>` | hash | lease -> nanos that its request may cost, while the lease is held; expires |
| `hc:spend:<key id>` | hash | day, month or `total` -> what the key's requests cost in it, in nanos |
| `hc:requests` | hash | request id -> RequestRecord |
| `hc:requests-by-end` | sorted set | request ids by `ended_at` |
| `hc:requests-by-client-id` | sorted set | `<client request id> <ended_at> <request id>` |
| `hc:usage:<day>` | hash | JSON [function, tenant, column] -> sum over the UTC day's records |
| `hc:usage-days` | set | days that have sums |
| `hc:intervals` | hash | JSON [instance id, state, from_at] -> InstanceInterval |
| `hc:intervals-by-end` | sorted set | the same identities by `to_at` |
| `hc:intervals-by-start` | sorted set | and by `from_at` |
| `hc:lost` | hash | id -> LostCall |
| `hc:lost-by-end` | sorted set | the same ids by `ended_at` |
| `hc:rates` | hash | rate id -> Rate |
| `hc:audit:<log>` | stream | `id` and `entry` (AuditEntry) of a change, before it is made, or of a refusal |
| `hc:audit-outcomes:<log>` | hash | id of an entry -> AuditOutcome, "" until then |
| `hc:archive` | hash | SHA-256 of a blob -> ArchiveFile, the rows of which are being removed here |
| `hc:archive-state` | hash | `serial` of the last change of `hc:archive`, `epoch` of its last writer, |
| | | `closed`: requests that ended before are added by that writer alone, |
| | | `alias <tenant>` -> pseudonym of a tenant that is being deleted |
| `hc:job:<id>` | hash | a job: `record` (JobSpec), `body`, `status`, … (registry/redis/jobs.py) |
| `hc:jobs-of:<tenant>` | sorted set | ids of the tenant's predictions, by their order |
| `hc:job-queue:<tenant>` | sorted set | ids of the tenant's jobs that wait, in their order |
| `hc:job-turns` | sorted set | tenants with such jobs, by their last turn |
| `hc:jobs-running` | sorted set | ids of jobs that run, by the expiry of their lease (ms) |
| `hc:jobs-queued` | sorted set | ids of jobs that wait, by when they were submitted (ms) |
| `hc:jobs-later` | sorted set | ids of jobs that wait for a time (ms) |
| `hc:jobs-ended` | sorted set | ids of jobs that have ended, by when they are removed (ms) |
| `hc:job-hooks` | sorted set | ids of jobs and batches with a webhook to deliver, by when it is due (ms) |
| `hc:job-usage` | hash | `jobs`, `bytes`, `files`, `file-bytes`, `batches` in all, and with a tenant; |
| | | `serial` of turns, `jobs-ever` |
| `hc:job-states` | hash | how many there are: `prediction`, `line` or `batch` with a status |
| `hc:job-events` | stream | one entry an event: field = its kind, value = the id of a job or batch |
| `hc:files` | hash | file id -> FileRecord |
| `hc:files-of:<tenant>` | sorted set | ids of the tenant's files by their creation |
| `hc:files-by-expiry` | sorted set | ids of all files by when they are removed (Unix seconds) |
| `hc:batches` | hash | batch id -> BatchRecord |
| `hc:batches-of:<tenant>` | sorted set | ids of the tenant's batches by their creation |
| `hc:batches-open` | set | ids of batches that have not ended |
| `hc:batches-by-expiry` | sorted set | ids of those that have, by when they are removed (Unix seconds) |
| `hc:batch:<id>` | hash | fields of BatchCounts; `tenant`, `hook` and `tries` of a webhook |
| `hc:batch-lines:<id>` | set | ids of jobs of its lines that have not ended |
| `hc:batch-results:<id>` | list | LineResult of lines that have ended, until they are in a file |
"""

CLUSTER = "hc:cluster"
PROBE = "hc:probe"
INCARNATION = "hc:incarnation"
FEED = "hc:feed"
FUNCTIONS = "hc:functions"
VERSIONS = "hc:versions"
SECRETS = "hc:secrets"
LAST_VERSIONS = "hc:last-versions"
EPOCHS = "hc:epochs"
NODES = "hc:nodes"
NODE_PREFIX = "hc:node:"
INSTANCES_PREFIX = "hc:instances:"
GATEWAYS = "hc:gateways"
LOAD_PREFIX = "hc:load:"
SCALE_PREFIX = "hc:scale:"
SCALED = "hc:scaled"
SCALE_REQUEST_PREFIX = "hc:scale-request:"
CASTS = "hc:casts"
CAST_PREFIX = "hc:cast:"
LIVES = "hc:lives"
LIVE_PREFIX = "hc:live:"
SCALING_PREFIX = "hc:scaling:"
LEASE_PREFIX = "hc:lease:"
LEASE_EPOCHS = "hc:lease-epochs"
API_KEYS = "hc:keys"
BUCKET_PREFIX = "hc:bucket:"
CONCURRENCY_PREFIX = "hc:concurrency:"
RESERVED_PREFIX = "hc:reserved:"
SPEND_PREFIX = "hc:spend:"
REQUESTS = "hc:requests"
REQUESTS_BY_END = "hc:requests-by-end"
REQUESTS_BY_CLIENT_ID = "hc:requests-by-client-id"
USAGE_PREFIX = "hc:usage:"
USAGE_DAYS = "hc:usage-days"
INTERVALS = "hc:intervals"
INTERVALS_BY_END = "hc:intervals-by-end"
INTERVALS_BY_START = "hc:intervals-by-start"
LOST_CALLS = "hc:lost"
LOST_CALLS_BY_END = "hc:lost-by-end"
RATES = "hc:rates"
AUDIT_PREFIX = "hc:audit:"
AUDIT_OUTCOMES_PREFIX = "hc:audit-outcomes:"
ARCHIVE = "hc:archive"
ARCHIVE_STATE = "hc:archive-state"
JOB_PREFIX = "hc:job:"
JOBS_OF_PREFIX = "hc:jobs-of:"
JOB_QUEUE_PREFIX = "hc:job-queue:"
JOB_TURNS = "hc:job-turns"
JOBS_RUNNING = "hc:jobs-running"
JOBS_QUEUED = "hc:jobs-queued"
JOBS_LATER = "hc:jobs-later"
JOBS_ENDED = "hc:jobs-ended"
JOB_HOOKS = "hc:job-hooks"
JOB_USAGE = "hc:job-usage"
JOB_STATES = "hc:job-states"
JOB_EVENTS = "hc:job-events"
FILES = "hc:files"
FILES_OF_PREFIX = "hc:files-of:"
FILES_BY_EXPIRY = "hc:files-by-expiry"
BATCHES = "hc:batches"
BATCHES_OF_PREFIX = "hc:batches-of:"
BATCHES_OPEN = "hc:batches-open"
BATCHES_BY_EXPIRY = "hc:batches-by-expiry"
BATCH_PREFIX = "hc:batch:"
BATCH_LINES_PREFIX = "hc:batch-lines:"
BATCH_RESULTS_PREFIX = "hc:batch-results:"

# Approximate length of the feed: a watcher that is further behind takes a new snapshot.
FEED_LENGTH = 10_000
# Entries of each audit log, of some 500 bytes; the oldest are removed beyond.
AUDIT_LENGTH = 100_000
# Approximate length of the stream of job events; who misses one finds it in the job.
JOB_EVENTS_LENGTH = 2000
# The instances of a node outlive its record by this, so that a node that expired for a moment regains
# them with its next heartbeat; renewed by each heartbeat.
INSTANCES_TTL_S = 3600
# A scale request repeated with the same token within this time is ignored.
SCALE_TOKEN_TTL_S = 3600
# A cast is kept for this long after its last change.
CAST_TTL_S = 3600
# The last scaling decision of a function is kept for this long.
SCALING_TTL_S = 30 * 86_400
# A bucket unused for this long is empty.
BUCKET_TTL_S = 86_400
# Longer than any request runs after the last that reserved.
RESERVED_TTL_S = 86_400


def node(node_id: str) -> str:
    return NODE_PREFIX + node_id


def instances(node_id: str) -> str:
    return INSTANCES_PREFIX + node_id


def load_report(gateway: str) -> str:
    return LOAD_PREFIX + gateway


def scale(token: str) -> str:
    return SCALE_PREFIX + token


def scale_request(function: str) -> str:
    return SCALE_REQUEST_PREFIX + function


def cast(cast_id: str) -> str:
    return CAST_PREFIX + cast_id


def live(function: str, number: int) -> str:
    return LIVE_PREFIX + version(function, number)


def scaling(function: str) -> str:
    return SCALING_PREFIX + function


def lease(name: str) -> str:
    return LEASE_PREFIX + name


def client_request(client_request_id: str, ended_at: float, request_id: str) -> str:
    """Return the member of the index by client request id: all of one id in order of their end."""
    return f"{client_request_id} {ended_at:017.6f} {request_id}"


def bucket(key_id: str) -> str:
    return BUCKET_PREFIX + key_id


def concurrency(key_id: str) -> str:
    return CONCURRENCY_PREFIX + key_id


def reserved(key_id: str) -> str:
    return RESERVED_PREFIX + key_id


def spend(key_id: str) -> str:
    return SPEND_PREFIX + key_id


def audit(log: str) -> str:
    return AUDIT_PREFIX + log


def audit_outcomes(log: str) -> str:
    return AUDIT_OUTCOMES_PREFIX + log


def job(job_id: str) -> str:
    return JOB_PREFIX + job_id


def files_of(tenant: str) -> str:
    return FILES_OF_PREFIX + tenant


def batches_of(tenant: str) -> str:
    return BATCHES_OF_PREFIX + tenant


def batch(batch_id: str) -> str:
    return BATCH_PREFIX + batch_id


def batch_lines(batch_id: str) -> str:
    return BATCH_LINES_PREFIX + batch_id


def batch_results(batch_id: str) -> str:
    return BATCH_RESULTS_PREFIX + batch_id


def usage(day: int) -> str:
    return f"{USAGE_PREFIX}{day}"


def version(function: str, number: int) -> str:
    """Return the field of a version in VERSIONS; a function's name has no colon."""
    return f"{function}:{number}"

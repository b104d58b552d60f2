/*
 * Every byte that lives in shared memory.
 *
 *   directory  /shmq.<instance>          queue  /shmq.<instance>.<serial>
 *   +-----------------------------+      +-------------------------------------------+
 *   | header, registry lock       |      | header: P side | D side | waiters | arena  |
 *   | clients[1024]   (4 KiB each)|      | slots[N]                       (128 bytes) |
 *   | waiters[1024]               |      | ready, defer, requeue, free ring (u32[cap])|
 *   | requests[64]                |      | in-flight heap: when i64[cap], slot u32[]  |
 *   | topics[16384]               |      | deferred heap:  when i64[cap], slot u32[]  |
 *   | queues[16384]               |      | sessions[1024], leases, latency histograms  |
 *   | columns: next_deadline[],   |      | arena (message bodies)                     |
 *   |          next_due[]; writers|      +-------------------------------------------+
 *   | stores[128]                 |
 *   +-----------------------------+      results store  /shmq.<instance>.<serial>
 *                                        header, stripes, buckets, entries, arena
 *
 * P is a topic's publish lock, D a queue's deliver lock.
 * Both segments are laid out at their maximum size and are sparse. The `..._committed` words say how
 * far pages exist; nobody reads beyond them, as on tmpfs even reading a hole allocates a page.
 *
 * The slot's state word is the truth. Rings, heaps, the arena's bins, sessions' in-flight counts,
 * `in_use` and pins are derived from it: recovery throws them away and rebuilds them. These words
 * are never derived and never lowered: the topic's `committed` and `id_clock`, a slot's generation,
 * the queue's `order`, and the two disk positions (which only adoption and flush lower, by rules of
 * their own).
 *
 * Fixed-width types, offsets and indices only, no pointers. After a change of a struct: raise
 * SHMQ_LAYOUT_VERSION, run `tools/dev layout --accept`.
 */
#ifndef SHMQ_LAYOUT_H
#define SHMQ_LAYOUT_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SHMQ_MAGIC UINT64_C(0x0a0d31716d68731a) /* also shows a wrong byte order */
#define SHMQ_LAYOUT_VERSION 6

#define SHMQ_CLIENTS 1024
#define SHMQ_WAITERS 1024
#define SHMQ_REQUESTS 64
#define SHMQ_TOPICS 16384
#define SHMQ_QUEUES 16384
#define SHMQ_SESSIONS 1024
#define SHMQ_LEASES 64 /* a power of two: lease id % SHMQ_LEASES is the index of its entry */
#define SHMQ_LEASE_HOLDERS 64
#define SHMQ_LEASE_PARTS 32
#define SHMQ_WRITERS 256
#define SHMQ_STORES 128    /* results stores */
#define SHMQ_KEY_MOST 255u /* bytes */
#define SHMQ_NAME 80       /* at most 64 bytes, "#ephemeral" included; the rest is zero */
#define SHMQ_BASE 144      /* "<topic>:<channel>" */
#define SHMQ_DATA_PATH 1024
#define SHMQ_PINS 216  /* views that one client may hold at once; further views are copies */
#define SHMQ_HINTS 512 /* of a waiter for many queues: a queue's is its index % SHMQ_HINTS */
#define SHMQ_NONE UINT32_MAX

enum shmq_segment_kind {
	SHMQ_SEGMENT_DIRECTORY = 1,
	SHMQ_SEGMENT_QUEUE = 2,
	SHMQ_SEGMENT_STORE = 3
};

/* Readiness of a segment, stored last. */
enum shmq_ready { SHMQ_RAW_STATE = 0, SHMQ_READY_STATE = 1, SHMQ_CLOSED_STATE = 2 };

/* ---- the state word ---------------------------------------------------------------------------
 * bits 0-7 state, 8-23 owner (client index), 24-63 generation: raised by every take, never reset.
 * docs/protocol.md has the table of states. `death` says what a rebuild makes of each state.
 */
/* clang-format off */
enum shmq_state {
	SHMQ_FREE = 0,
	SHMQ_LOANED = 1,    /* its owner fills it outside the lock;   death: kept; the reaper frees it */
	SHMQ_PREPARED = 2,  /* order = seq; filled, not decided;      death: order <= committed ? READY or DEFERRED : FREE */
	SHMQ_READY = 3,     /* order = seq; in the ready ring;        death: stays */
	SHMQ_IN_FLIGHT = 4, /* owner, deadline in the heap;           death: stays; the reaper makes it REQUEUED */
	SHMQ_PINNED = 5,    /* finished, but a view pins it;          death: FREE when no log pins it */
	SHMQ_DEFERRED = 6,  /* deadline = due time (realtime);        death: stays, in the heap */
	SHMQ_REQUEUED = 7,  /* order = order; in the requeue ring;    death: stays */
	SHMQ_SPILLING = 8,  /* pos; in no ring;                       death: pos < disk_write ? FREE : kept
	                       previous DEFERRED: pos is a chunk;     death: pos <= deferred_write ? FREE : kept */
	SHMQ_RESTORED = 9,  /* pos; read from disk, not decided;      death: pos < disk_read ? REQUEUED : FREE
	                       previous DEFERRED: chunk, message;     death: before deferred_read ? DEFERRED : FREE */
	SHMQ_MOVING = 10,   /* move = seq; to other queues;           death: move <= committed ? FREE : previous state
	                       owner 0: of its own topic, else owner - 1 is the topic whose word decides */
	SHMQ_LEASED = 11,   /* move = lease; held for reading again;  death: the lease's word decides */
	SHMQ_STATES = 12
};
/* clang-format on */

#define SHMQ_STATE_OF(word) ((unsigned)((word) & 0xff))
#define SHMQ_OWNER_OF(word) ((unsigned)(((word) >> 8) & 0xffff))
#define SHMQ_GENERATION_OF(word) ((word) >> 24)
#define SHMQ_WORD(state, owner, generation)                                                        \
	((uint64_t)(state) | (uint64_t)(owner) << 8 | (uint64_t)(generation) << 24)

typedef struct shmq_slot_desc {
	_Atomic uint64_t word; /* the truth */
	uint64_t id;           /* 54 bits of clock (64 ns since 2026-01-01), 10 bits of node id */
	int64_t timestamp;     /* publish time, CLOCK_REALTIME ns */
	uint64_t order;        /* PREPARED, READY: seq; REQUEUED: order of return */
	/* IN_FLIGHT: CLOCK_MONOTONIC ns. DEFERRED: due time, CLOCK_REALTIME ns. PREPARED: due time if
	 * it is to become DEFERRED, else 0. */
	int64_t deadline;
	uint64_t body;     /* offset in the arena */
	uint32_t length;   /* bytes of the body, and of the properties in front of it */
	uint32_t capacity; /* bytes of its arena block; 0: it has none */
	uint32_t heap;     /* position in the heap its state belongs to; else SHMQ_NONE */
	uint16_t attempts; /* deliveries, this one included; wraps as nsqd's */
	uint8_t previous;  /* SPILLING, MOVING, RESTORED: the state it comes from; FREE: from disk */
	uint8_t flags;     /* enum shmq_slot_flag: which of the rare fields below mean something */
	/* REQUEUED: waits for READY messages below this seq; 0: may go first. CONVICTED with `previous`
	 * IN_FLIGHT: when, CLOCK_REALTIME ns. */
	uint64_t after; /* begins the second cache line: the consumer's side, and rare fields */
	/* SPILLING, RESTORED: disk position. REQUEUED with `previous` FREE: the position from which it
	 * was read ahead, so that it can be evicted. */
	uint64_t pos;
	/* MOVING: seq that decides. IN_FLIGHT: order of delivery. LEASED: id of the lease. */
	uint64_t move;
	int64_t delivered; /* IN_FLIGHT: delivery time, CLOCK_MONOTONIC ns */
	uint32_t session;  /* IN_FLIGHT: index of the consumer's session */
	uint32_t pins;     /* derived: views alive, from the clients' logs */
	uint32_t next;     /* LEASED: the lease's next slot */
	/* LEASED: its number in the lease, from 0. CONVICTED with `previous` IN_FLIGHT: the pid of its last
	 * consumer. */
	uint32_t turn;
	/* FAILED: failures << 16 | the low bits of the generation of the delivery that was counted
	 * last. One store counts a delivery, so a repeated repair counts it once. */
	_Atomic uint32_t failures;
	uint32_t properties; /* PROPERTIES: bytes before the body, in `length` too; SHMQ_SLOT_SEALED */
	int64_t expires;     /* EXPIRES, WAS_DUE: CLOCK_REALTIME ns */
} shmq_slot_desc;
_Static_assert(sizeof(shmq_slot_desc) == 128, "slot");
_Static_assert(offsetof(shmq_slot_desc, after) == 64, "slot: hot line");

/* The publisher of a message stores `flags` with the first cache line, so that a message without
 * any of these costs nothing on the second. Afterwards they change under D alone. */
enum shmq_slot_flag {
	SHMQ_SLOT_FAILED = 1,     /* `failures` is valid */
	SHMQ_SLOT_EXPIRES = 2,    /* `expires` is valid */
	SHMQ_SLOT_PROPERTIES = 4, /* `properties` is valid and not 0 */
	/* A consumer died with it: it is handed out alone, so that only the guilty one fails again. */
	SHMQ_SLOT_SUSPECT = 8,
	/* It was deferred. EXPIRES: `expires` has the queue's ttl from its due time; else it is that. */
	SHMQ_SLOT_WAS_DUE = 32,
	/* DEFERRED: to be moved to the dead topic. The two bits above say why: enum shmq_dead_reason. */
	SHMQ_SLOT_CONVICTED = 16
};
#define SHMQ_SLOT_REASON_SHIFT 6
#define SHMQ_SLOT_SEALED (UINT32_C(1) << 31) /* of `properties`: a sealed producer's (seal.h) */
enum shmq_dead_reason {
	SHMQ_DEAD_ATTEMPTS = 0,
	SHMQ_DEAD_REJECTED = 1,
	SHMQ_DEAD_EXPIRED = 2,
	SHMQ_DEAD_OVERFLOW = 3
};
/* The due time of a convicted message: before every other. */
#define SHMQ_DUE_CONVICTED 1

/* A robust, process-shared mutex on a line of its own. */
typedef struct shmq_lock_desc {
	pthread_mutex_t mutex;
	uint8_t pad[64 - sizeof(pthread_mutex_t)];
} shmq_lock_desc;
_Static_assert(sizeof(shmq_lock_desc) == 64, "lock");

/* A set of waiters: one bit for each, and a summary word with a bit for each word that has any. */
typedef struct shmq_waitset_desc {
	_Atomic uint64_t summary;
	_Atomic uint32_t rotor;
	uint32_t pad;
	_Atomic uint64_t words[SHMQ_WAITERS / 64];
	uint64_t reserved[6];
} shmq_waitset_desc;
_Static_assert(sizeof(shmq_waitset_desc) == 192, "waitset");

/* The header of both kinds of segment. Its creator stores `ready` last. */
typedef struct shmq_segment_desc {
	uint64_t magic;
	uint32_t layout_version;
	uint32_t kind;
	uint64_t fingerprint; /* sizes, offsets, alignments, page size, libc */
	uint64_t boot_id[2];
	uint64_t instance[2]; /* random, one per directory */
	uint64_t size;
	uint64_t serial; /* queue: the number in its name, never used twice; directory: 0 */
	_Atomic uint32_t ready;
	uint32_t page_size;
	uint64_t reserved[6];
} shmq_segment_desc;
_Static_assert(sizeof(shmq_segment_desc) == 128, "segment");

/* ---- directory ------------------------------------------------------------------------------ */

enum shmq_client_state { SHMQ_CLIENT_FREE = 0, SHMQ_CLIENT_LIVE = 1 };

typedef struct shmq_client_desc {
	_Atomic uint32_t state;
	_Atomic uint32_t generation; /* raised before the entry is filled */
	int32_t pid;
	uint32_t kind;              /* enum shmq_kind */
	uint64_t start_time;        /* of the process, clock ticks since boot (/proc/PID/stat 22) */
	uint64_t program;           /* its stack's start (28): tells an exec; 0: not readable */
	uint64_t pid_namespace;     /* inode */
	int64_t attached_at;        /* CLOCK_REALTIME ns */
	_Atomic uint32_t orphan;    /* the thread that held `life` is gone, the process lives */
	_Atomic uint32_t pins_high; /* entries of `pins` from here on were never used */
	uint32_t uid;
	uint32_t reserved0;
	shmq_lock_desc life; /* held while the client lives */
	_Atomic uint64_t touched[SHMQ_QUEUES / 64];
	_Atomic uint64_t pins[SHMQ_PINS]; /* pin_of a queue's serial and a slot; 0: unused */
	uint64_t reserved[24];
} shmq_client_desc;
_Static_assert(sizeof(shmq_client_desc) == 4096, "client");
_Static_assert(offsetof(shmq_client_desc, life) == 64, "client: life");

/* Whether a ring wakes somebody, of a waiter for many queues (lanes.c). The owner stores it; a waker
 * turns ASLEEP and LIMITED to AWAKE before it rings. Its death in between, or the owner's: the
 * reaper rings everybody, and clears the entries of the dead. */
enum shmq_turn {
	SHMQ_TURN_PLAIN = 0,  /* it waits for one queue at a time, or for something else */
	SHMQ_TURN_AWAKE = 1,  /* leave a hint, and wake another waiter */
	SHMQ_TURN_ASLEEP = 2, /* leave a hint and ring: it looks */
	SHMQ_TURN_LIMITED = 3 /* leave a hint and ring, and wake another waiter: it may take nothing */
};

typedef struct shmq_waiter_desc {
	_Atomic uint64_t owner; /* client index + 1 in the low half, its generation above; 0: free */
	sem_t bell;
	_Atomic uint32_t turn;  /* enum shmq_turn */
	_Atomic uint32_t names; /* 1: it is rung when a topic or a channel comes or goes */
	uint64_t reserved[2];
	/* Which queues to look at. Any waker sets bits, the owner takes them; a bit that got lost is
	 * made up for after 1 s, one too many costs a look. */
	_Atomic uint64_t hints[SHMQ_HINTS / 64];
} shmq_waiter_desc;
_Static_assert(sizeof(shmq_waiter_desc) == 128, "waiter");
_Static_assert(offsetof(shmq_waiter_desc, hints) == 64, "waiter: hints");

enum shmq_request_state {
	SHMQ_REQUEST_FREE = 0,
	SHMQ_REQUEST_POSTED = 1,
	SHMQ_REQUEST_DONE = 2,
	SHMQ_REQUEST_ABANDONED = 3
};

typedef struct shmq_request_desc {
	_Atomic uint32_t state;
	uint32_t op; /* enum shmq_request_kind */
	uint32_t client;
	uint32_t waiter; /* SHMQ_NONE: its owner polls */
	int32_t status;  /* DONE: 0 or a status */
	uint32_t reserved0;
	char topic[SHMQ_NAME]; /* DONE with SHMQ_REFUSED: this and `channel` have the reason */
	char channel[SHMQ_NAME];
	uint64_t numbers[2]; /* CREATE_STORE: max_keys, max_bytes */
	uint64_t reserved[7];
} shmq_request_desc;
_Static_assert(sizeof(shmq_request_desc) == 256, "request");

/* ERASING: it is being deleted with its files. */
enum shmq_entry_state { SHMQ_ENTRY_FREE, SHMQ_ENTRY_LIVE, SHMQ_ENTRY_DELETING, SHMQ_ENTRY_ERASING };
#define SHMQ_FLAG_EPHEMERAL 1u
#define SHMQ_FLAG_DEAD 2u /* of a topic: dead letters were moved to it */

/* The policies of a queue, or of a topic, for the queues that it gets later. There are two of these;
 * the word `policy` says which one holds. The other is written (a queue's under P and D, a topic's
 * under P) before the word turns, so a reader under such a lock sees one of them whole. */
typedef struct shmq_settings_desc {
	uint64_t max_messages; /* waiting, in memory and on disk; 0: no limit */
	uint64_t max_bytes;    /* of their bodies; 0: no limit */
	int64_t message_ttl;   /* ns; 0: messages do not expire */
	int64_t retry_first;   /* ns before a failed message is delivered again; 0: at once */
	int64_t retry_most;    /* the delay doubles with each failure up to this */
	uint32_t max_attempts; /* failures that convict a message; 0: no limit */
	uint32_t overflow;     /* enum shmq_overflow */
	uint32_t flags;        /* enum shmq_setting_flag */
	uint32_t reserved0;
	char dead_letter[SHMQ_NAME]; /* the dead topic; empty: <topic>.<channel>.dead */
	uint64_t reserved[7];
} shmq_settings_desc;
_Static_assert(sizeof(shmq_settings_desc) == 192, "settings");

/* Bits of a `policy` word: what the hot paths look at. */
enum shmq_policy {
	SHMQ_POLICY_SECOND = 1,   /* settings[1] holds, else settings[0] */
	SHMQ_POLICY_LIMITS = 2,   /* max_messages, max_bytes, or another overflow than disk */
	SHMQ_POLICY_EXPIRY = 4,   /* message_ttl */
	SHMQ_POLICY_FAILURES = 8, /* max_attempts or a retry delay */
	SHMQ_POLICY_BYTES = 16,   /* max_bytes: the bytes of READY bodies are counted */
	SHMQ_POLICY_MEMORY = 32,  /* an overflow other than disk: nothing goes to disk */
	SHMQ_POLICY_SEALED = 64   /* only for what is sealed: a topic; a channel: producer.c */
};

typedef struct shmq_topic_desc {
	_Atomic uint32_t state;
	_Atomic uint32_t generation; /* raised by every delete */
	uint32_t flags;
	_Atomic uint32_t paused;
	char name[SHMQ_NAME];
	_Atomic uint64_t version; /* raised when its queues, SEALED or `paused` change, under P */
	uint64_t reserved0[3];
	shmq_lock_desc publish; /* P */
	/* under P */
	_Atomic uint64_t committed; /* the commit word: highest decided seq; also counts messages */
	_Atomic uint64_t id_clock;  /* last clock given out, 64 ns units */
	_Atomic uint32_t dirty;     /* a holder of P died; rebuild every queue before anything else */
	/* Index + 1 of the queue from which dead letters are moved here; 0: none. Stored before a slot
	 * becomes MOVING, so that the next locker of P decides those slots. */
	_Atomic uint32_t moving;
	_Atomic uint64_t messages; /* published, counters of nsqd's /stats */
	_Atomic uint64_t bytes;
	_Atomic uint32_t policy; /* bits of enum shmq_policy */
	uint32_t reserved1;
	uint64_t reserved2[10];
	shmq_settings_desc settings[2]; /* of the queues that are created from now on */
} shmq_topic_desc;
_Static_assert(sizeof(shmq_topic_desc) == 704, "topic");
_Static_assert(offsetof(shmq_topic_desc, publish) == 128, "topic: publish lock");
_Static_assert(offsetof(shmq_topic_desc, committed) == 192, "topic: commit word");

enum shmq_role { SHMQ_ROLE_BACKLOG = 0, SHMQ_ROLE_CHANNEL = 1 };

/* `role` turns once from BACKLOG to CHANNEL: that store is the take-over. */
typedef struct shmq_entry_desc {
	_Atomic uint32_t state;
	_Atomic uint32_t generation;
	uint64_t serial;
	uint32_t topic;
	uint32_t flags;
	_Atomic uint32_t role;
	uint32_t reserved0;
	char name[SHMQ_NAME]; /* of the channel; written before `role` */
	uint64_t size;
	uint64_t reserved[9];
} shmq_entry_desc;
_Static_assert(sizeof(shmq_entry_desc) == 192, "entry");

/* Options of the data path; set by the supervisor at creation and adoption. */
typedef struct shmq_limits_desc {
	int64_t msg_timeout;     /* ns */
	int64_t max_msg_timeout; /* ns */
	int64_t max_req_timeout; /* ns */
	uint64_t max_msg_size;   /* bytes */
	uint32_t node_id;
	uint32_t mem_queue_size; /* messages, for new queues */
	uint32_t in_flight_slots;
	uint32_t reserved0;
	uint64_t arena_size; /* bytes of bodies a queue, for new queues */
	uint64_t reserved[1];
} shmq_limits_desc;
_Static_assert(sizeof(shmq_limits_desc) == 64, "limits");

typedef struct shmq_directory_desc {
	shmq_segment_desc segment;
	shmq_limits_desc limits;
	shmq_lock_desc registry;
	/* 256 */
	uint64_t clients_at, waiters_at, requests_at, topics_at, queues_at, deadline_at, due_at;
	_Atomic uint32_t clients_committed; /* entries, not bytes */
	_Atomic uint32_t topics_committed;
	_Atomic uint32_t queues_committed;
	_Atomic uint32_t waiters_high; /* highest used + 1 */
	_Atomic uint64_t generation;   /* raised by create, delete, pause; the metadata's clock */
	_Atomic uint64_t next_serial;
	/* supervisor */
	_Atomic int32_t supervisor_pid;
	_Atomic uint32_t supervisor_client; /* index + 1; 0: none yet */
	_Atomic uint64_t supervisor_start_time;
	_Atomic int64_t supervisor_since;   /* CLOCK_REALTIME ns */
	_Atomic int64_t heartbeat;          /* CLOCK_MONOTONIC ns */
	_Atomic uint32_t supervisor_waiter; /* doorbell to ring; index + 1 */
	_Atomic uint32_t epoch;             /* raised by each supervisor */
	_Atomic uint32_t stopping;
	/* Reasons for which the supervisor was rung since it last looked: bits of enum shmq_ring. */
	_Atomic uint32_t requested;
	_Atomic uint64_t reaped;  /* clients returned by the reaper */
	_Atomic uint64_t rebuilt; /* queues rebuilt after a death */
	uint64_t pid_namespace;
	uint64_t writers_at;
	/* The scanner sleeps until one of these times. A process that makes a deadline or a due time
	 * earlier rings. */
	_Atomic int64_t scan_deadline; /* CLOCK_MONOTONIC ns */
	_Atomic int64_t scan_due;      /* CLOCK_REALTIME ns */
	/* nsqd.dat's time of modification (ns): the one that the supervisor wrote last or is about to
	 * write, and the one before. If the file has neither, another broker has used the data path. */
	_Atomic uint64_t names_written;
	_Atomic uint64_t names_replaced;
	char data_path[SHMQ_DATA_PATH]; /* absolute; empty: not known, or too long */
	/* The errno with which the data path refuses writes | seconds since 1970 << 16; 0: it accepts
	 * them. The supervisor alone stores it, so it means nothing while no supervisor lives; the next
	 * one begins with 0. */
	_Atomic uint64_t disk_trouble;
	uint64_t stores_at;
	uint64_t seal_key[4]; /* secret; stored before `ready`, and never changed */
	uint64_t reserved[65];
	/* One bit for each queue with work for the spiller. */
	_Atomic uint64_t spiller_pending[SHMQ_QUEUES / 64];
} shmq_directory_desc;
_Static_assert(sizeof(shmq_directory_desc) == 4096, "directory");

/* ---- queue ---------------------------------------------------------------------------------- */

typedef struct shmq_session_desc {
	_Atomic uint32_t client; /* index + 1; 0: free. Written last */
	uint32_t generation;     /* the client entry's */
	uint32_t max_in_flight;
	_Atomic uint32_t in_flight; /* derived; waiters read it without D */
	int64_t since;              /* CLOCK_REALTIME ns */
	uint64_t delivered, finished, requeued;
	uint64_t timed_out;
	/* The suspect that was handed out last: slot + 1; 0: none. A hint: the slot's own state and flag
	 * say whether it still is one of this session. */
	_Atomic uint32_t suspect;
	uint32_t reserved;
} shmq_session_desc;
_Static_assert(sizeof(shmq_session_desc) == 64, "session");

enum shmq_lease_state {
	SHMQ_LEASE_FREE = 0,
	SHMQ_LEASE_TAKING = 1,   /* death: its messages go back to where they were */
	SHMQ_LEASE_HELD = 2,     /* death: stays */
	SHMQ_LEASE_FINISHED = 3, /* death: its messages are FREE */
	SHMQ_LEASE_RETURNED = 4  /* death: its messages are REQUEUED, in front of all others */
};

/* A set of messages held under a name. `word` is the commit word of all of them (lease.c), under D. */
typedef struct shmq_lease_desc {
	_Atomic uint64_t word; /* bits 0-7 state, above them the id; ids rise */
	uint64_t parent;       /* the lease that its holder took before it; 0: none */
	uint64_t bytes;        /* of bodies */
	int64_t since;         /* CLOCK_REALTIME ns */
	uint64_t base;         /* RETURNED: order of its first message */
	uint32_t holder;
	uint32_t count; /* messages */
	uint32_t parts;
	_Atomic uint32_t replays; /* how often a reading of it was planned again */
	uint32_t at;              /* FINISHED: the next slot to free, and how many are left */
	uint32_t left;
	/* Slot of each part's first message in memory; SHMQ_NONE: the part has none. */
	uint32_t first[SHMQ_LEASE_PARTS];
	uint32_t on_disk; /* further messages, in the queue's run */
	uint32_t reserved0;
	uint64_t reserved[7];
} shmq_lease_desc;
_Static_assert(sizeof(shmq_lease_desc) == 256, "lease");

/* One lease of a queue at a time may hold messages on disk in place: a run of records that begins
 * at the read position. Finishing the lease moves the read position past the run; returning it
 * leaves the position. Until then nothing is read from disk into memory. Under D. */
typedef struct shmq_run_desc {
	_Atomic uint64_t lease; /* the lease's id, written last; valid while that lease is HELD */
	uint64_t from, to;      /* positions */
	uint64_t bytes;         /* of bodies */
	uint64_t count;         /* records */
	uint64_t at[SHMQ_LEASE_PARTS]; /* position of each part's first record */
} shmq_run_desc;
_Static_assert(sizeof(shmq_run_desc) == 296, "run");

/* A holder of leases: a name that outlives processes. Under D. */
typedef struct shmq_lease_holder_desc {
	_Atomic uint32_t state;  /* 0: free. Written last */
	_Atomic uint32_t client; /* the owner's index + 1; 0: it has no owner */
	/* Other 64 random bits for every new owner: its proof, which nothing shows. The owner before is
	 * fenced then. A death after this store: nobody knows them, the next owner makes others. */
	_Atomic uint64_t incarnation;
	int64_t ttl;              /* ns without a sign of life; INT64_MAX: never */
	int64_t grace;            /* ns without an owner; INT64_MAX: never */
	_Atomic int64_t deadline; /* CLOCK_MONOTONIC ns; its leases are returned then */
	uint64_t start_time;      /* the owner's process, as in its client entry */
	int32_t pid;
	uint32_t reserved0;
	_Atomic uint64_t finished; /* highest lease that it finished */
	_Atomic uint64_t lost;     /* leases returned because its time was over */
	char name[SHMQ_NAME];
	/* Hashes: of the secret with which the network may open the name again; of whose it is, 0: shared
	 * memory's. An open stores them before `client`; after a death the next open replaces them. */
	uint64_t proof[2], whose;
	uint64_t reserved[10];
} shmq_lease_holder_desc;
_Static_assert(sizeof(shmq_lease_holder_desc) == 256, "holder");

/* The progress of a producer in epochs, so that nothing is published twice (writer.c). Under P. */
typedef struct shmq_writer_desc {
	_Atomic uint64_t topic; /* index + 1, generation << 32; bit 31: being made; 0: free */
	uint64_t key[2];
	uint64_t used,
			whose; /* last use (CLOCK_MONOTONIC ns); hash of its client on the network, or 0 */
	uint64_t epoch, rows; /* epoch + 1, 0: none; messages of it that are published */
	/* A pending update: (next_epoch, next_rows) take effect once topic.committed >= next_seq.
	 * next_seq 0: none is pending. */
	uint64_t next_epoch, next_rows;
	_Atomic uint64_t next_seq;
	_Atomic uint64_t gone[5], had; /* digests of the last that gave way here; how many did */
} shmq_writer_desc;
_Static_assert(sizeof(shmq_writer_desc) == 128, "writer");

/* The time from publish to finish. There are eight buckets per octave from 1 us to 39 h, so a
 * percentile is exact to 6 %. `total` counts since the queue was made. The current one of the two
 * windows fills for half of SHMQ_LATENCY_WINDOW_NS; then the other is cleared and becomes current,
 * as in nsqd. Under D. */
#define SHMQ_LATENCY_BUCKETS 304
#define SHMQ_LATENCY_FIRST 10 /* bucket 0: under 2^10 ns */
#define SHMQ_LATENCY_WINDOW_NS INT64_C(600000000000)

/* Of messages held for 2^22 ns or longer (a take is known to a tick, 4 ms): all their time, the wait
 * before the last take, the processing after it. Two buckets per octave from 2^22 ns. Modulo 2^32. */
#define SHMQ_PARTS_BUCKETS 50
#define SHMQ_PARTS_FIRST 22

typedef struct shmq_histogram_desc {
	int64_t since; /* CLOCK_REALTIME ns */
	uint64_t count;
	uint64_t sum; /* ns */
	uint64_t buckets[SHMQ_LATENCY_BUCKETS];
} shmq_histogram_desc;

typedef struct shmq_latency_desc {
	uint32_t current;
	uint32_t reserved0;
	shmq_histogram_desc total;
	shmq_histogram_desc window[2];
	uint32_t held_total[SHMQ_PARTS_BUCKETS], held_wait[SHMQ_PARTS_BUCKETS];
	uint32_t processing[SHMQ_PARTS_BUCKETS];
	uint64_t reserved[27];
} shmq_latency_desc;
_Static_assert(sizeof(shmq_latency_desc) == 8192, "latency");

#define SHMQ_ARENA_UNIT 64u /* block sizes are multiples; a body starts 16 bytes into its block */
#define SHMQ_ARENA_HEAD 16u
#define SHMQ_ARENA_FL 32
#define SHMQ_ARENA_SL 8

/* Segregated free lists (two levels) over boundary-tagged blocks. Under P, derived. */
typedef struct shmq_arena_desc {
	uint32_t fl; /* bit f: sl[f] is not 0 */
	uint32_t reserved0;
	uint64_t free_bytes;
	uint8_t sl[SHMQ_ARENA_FL];
	uint64_t heads[SHMQ_ARENA_FL][SHMQ_ARENA_SL]; /* block offset + 1; 0: empty */
	uint64_t reserved[250];
} shmq_arena_desc;
_Static_assert(sizeof(shmq_arena_desc) == 4096, "arena");

typedef struct shmq_queue_desc {
	shmq_segment_desc segment;
	/* 128: fixed at creation */
	uint32_t index;
	uint32_t topic;
	uint32_t slots_max;
	uint32_t mem_queue_size;  /* for READY and SPILLING together, which get at least SHMQ_TRANSIT */
	uint32_t in_flight_slots; /* for all other slots that are not free */
	uint32_t flags;
	uint64_t arena_max;
	uint64_t slots_at, ready_at, defer_at, requeue_at, free_at;
	uint64_t in_flight_when_at, in_flight_slot_at, deferred_when_at, deferred_slot_at;
	uint64_t sessions_at, leases_at, latency_at, arena_at, lease_holders_at;
	uint32_t low_water; /* with fewer messages in the requeue ring the spiller reads from disk */
	uint32_t reserved00;
	uint64_t reserved0[13];
	/* 384: changed under both locks */
	_Atomic uint32_t slots_committed; /* also the heaps' capacity */
	_Atomic uint32_t ring_mask;       /* capacity of the rings - 1, a power of two >= slots */
	_Atomic uint32_t sessions_committed;
	_Atomic uint32_t dirty; /* derived state may be wrong: rebuild it under P and D */
	_Atomic uint32_t paused;
	_Atomic uint32_t policy;         /* bits of enum shmq_policy */
	_Atomic uint64_t disk_write;     /* commit word of a spill: file << 40 | offset */
	_Atomic uint64_t disk_read;      /* commit word of a restore */
	_Atomic uint64_t disk_depth;     /* messages between the two; recounted at adoption */
	_Atomic uint32_t spilling;       /* 1: a batch is being written, which counts as "on disk" */
	_Atomic uint32_t overflowed;     /* 1: the oldest quarter was moved since the disk was empty */
	_Atomic uint32_t base_pending;   /* 1: its files still have the topic's name: no spill yet */
	_Atomic uint32_t defer_tail;     /* under P; here because deferred publishes are rare */
	_Atomic uint32_t spilling_count; /* under D, derived; here because spills are rare */
	uint32_t reserved2;
	/* Commit word: chunks of deferred messages up to this number are on disk. */
	_Atomic uint64_t deferred_write;
	/* Commit word: chunk << 24 | its next message, of the chunk that was read last. */
	_Atomic uint64_t deferred_read;
	_Atomic uint64_t deferred_gone;  /* chunks up to this number were emptied */
	_Atomic uint64_t deferred_depth; /* messages in chunks; recounted at adoption */
	uint64_t reserved3[3];
	/* 512: P side. `..._cached` is P's last reading of a word of D's side, and never ahead of it;
	 * so the cache lines of the two sides do not move between cores at every message. */
	_Atomic uint32_t ready_tail;
	_Atomic uint32_t free_head;
	uint32_t bodies_reclaimed_to; /* free-ring entries before this own no body to reclaim */
	uint32_t free_tail_cached;
	uint32_t ready_head_cached;
	/* Free-ring entries before this may own bodies from a publish that then found no room in
	 * another queue. */
	uint32_t bodies_prepared_to;
	_Atomic uint64_t arena_committed; /* bytes */
	_Atomic uint64_t enqueued;        /* messages that entered, nsqd's message_count */
	_Atomic uint64_t enqueued_bytes;
	_Atomic uint64_t dropped;    /* by a full ephemeral queue */
	_Atomic uint64_t need_bytes; /* what a waiting publisher needs; 0: none waits */
	_Atomic uint32_t need_slots;
	uint32_t reserved4;
	/* With SHMQ_POLICY_BYTES: bytes of the bodies that became READY; derived. */
	_Atomic uint64_t ready_bytes_in;
	uint64_t reserved5[6];
	/* 640: D side */
	_Atomic uint32_t ready_head;
	_Atomic uint32_t defer_head;
	_Atomic uint32_t requeue_head;
	_Atomic uint32_t requeue_tail;
	_Atomic uint32_t free_tail;
	_Atomic uint32_t in_flight_len;
	_Atomic uint32_t deferred_len;
	_Atomic uint32_t in_use; /* slots not free and not READY, PREPARED, SPILLING, LOANED */
	_Atomic uint64_t in_use_bytes;
	_Atomic uint64_t order; /* last order given, never lowered */
	_Atomic uint64_t delivered;
	_Atomic uint64_t finished;
	_Atomic uint64_t requeued;
	_Atomic uint64_t timed_out;
	_Atomic uint64_t returned; /* taken back from dead or closed consumers */
	_Atomic uint64_t spilled;
	_Atomic uint64_t restored;
	uint32_t ready_tail_cached;        /* D's last reading of ready_tail */
	_Atomic uint32_t leases_committed; /* 1: the pages of leases and lease_holders exist */
	_Atomic uint64_t lease_id;         /* last id given, never lowered */
	_Atomic uint32_t leased;           /* messages in leases; derived */
	uint32_t requeue_head_group_end;   /* derived: after the ring's last entry that may go first */
	/* 768 */
	shmq_lock_desc deliver; /* D */
	/* D side. With SHMQ_POLICY_BYTES: bytes of the bodies that are READY no more; derived. */
	_Atomic uint64_t ready_bytes_out;
	uint64_t reserved8[7];
	shmq_waitset_desc takers;           /* 896: waiters for messages */
	shmq_waitset_desc space;            /* 1088: waiters for room */
	char base[SHMQ_BASE];               /* 1280: base name of its files */
	shmq_run_desc run;                  /* D side */
	_Atomic uint64_t delivered_on_disk; /* of `delivered`: leased in place on disk */
	/* 1728: policies, under P and D unless said otherwise */
	shmq_settings_desc settings[2];
	/* No message expires before this, CLOCK_REALTIME ns; INT64_MAX: none does. Publishers lower it,
	 * the sweep raises it. */
	_Atomic int64_t next_expiry;
	_Atomic uint64_t expired;       /* D side: messages whose time was over */
	_Atomic uint64_t dead_lettered; /* D side: moved to the dead topic */
	_Atomic uint64_t dropped_oldest;
	_Atomic uint64_t rejected; /* publishes that a limit refused; P side */
	/* D side: some session may hold a suspect (session.suspect); 0: none does. A hint. */
	_Atomic uint32_t suspects;
	uint32_t reserved10;
	uint64_t reserved9[242];
	shmq_arena_desc arena; /* 4096 */
} shmq_queue_desc;
_Static_assert(offsetof(shmq_queue_desc, slots_committed) == 384, "queue: both");
_Static_assert(offsetof(shmq_queue_desc, ready_tail) == 512, "queue: P side");
_Static_assert(offsetof(shmq_queue_desc, ready_head) == 640, "queue: D side");
_Static_assert(offsetof(shmq_queue_desc, deliver) == 768, "queue: D");
_Static_assert(offsetof(shmq_queue_desc, takers) == 896, "queue: waiters");
_Static_assert(offsetof(shmq_queue_desc, arena) == 4096, "queue: arena");
_Static_assert(sizeof(shmq_queue_desc) == 8192, "queue");

#define SHMQ_STORE_KEYS_MAX (1u << 24)

#define SHMQ_HEAP_WAYS 8u     /* children of a heap's node: those of i begin at 8 i + 1 */
#ifndef SHMQ_TRANSIT          /* tests build smaller queues */
#define SHMQ_TRANSIT 256u     /* the smallest READY budget, also with mem_queue_size = 0 */
#define SHMQ_SLOTS_FIRST 128u /* slots committed at creation */
#define SHMQ_STORE_FIRST 64u  /* entries of a results store committed at creation */
#endif
#define SHMQ_ARENA_FIRST 16384u /* bytes of bodies committed at creation */
#define SHMQ_SESSIONS_FIRST 64u

/* Orders begin here: messages that go before the requeue ring's head count down from its order, and
 * no seq is this high. */
#define SHMQ_ORDER_FIRST (UINT64_C(1) << 48)

#define SHMQ_NO_POSITION UINT64_MAX
#define SHMQ_POS_SHIFT 40
#define SHMQ_POS(file, offset) ((uint64_t)(file) << SHMQ_POS_SHIFT | (uint64_t)(offset))
#define SHMQ_POS_FILE(pos) ((pos) >> SHMQ_POS_SHIFT)
#define SHMQ_POS_OFFSET(pos) ((pos) & ((UINT64_C(1) << SHMQ_POS_SHIFT) - 1))
/* deferred_read: the bits below this one are the number of a message in its chunk. */
#define SHMQ_CHUNK_SHIFT 24

#define SHMQ_EPOCH_NS INT64_C(1767225600000000000) /* 2026-01-01T00:00:00Z */
#define SHMQ_ID_UNIT_NS 64
#define SHMQ_ID_NODE_BITS 10

/* The most slots of a queue, and the most bytes of its bodies. */
#define SHMQ_SLOTS_MAX (1u << 25)
#define SHMQ_ARENA_MAX (UINT64_C(1) << 38)

#include "memory/layout_store.h"

#endif

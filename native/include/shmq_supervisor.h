/*
 * shmq: the contract of the core for the supervisor: making and removing segments, deadlines,
 * overflow, deferred messages on disk, adoption, the reaper. The rules of shmq.h hold here too.
 */
#ifndef SHMQ_SUPERVISOR_H
#define SHMQ_SUPERVISOR_H

#include "shmq.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the instance --------------------------------------------------------------------------- */

/* The size of a directory segment in bytes. */
uint64_t shmq_directory_bytes(void);
/* Make a new directory of the empty shared memory object `fd`: size it, reserve its pages, fill it,
 * and store READY last. SHMQ_NO_SPACE: the tmpfs is full; SHMQ_NO_MEMORY: it cannot be mapped;
 * SHMQ_INVALID: a limit is out of range. key: SHMQ_SEAL_KEY bytes that nobody else can know; NULL: no
 * message that has been on disk counts as sealed. death: a raw segment, which no opener accepts and the next
 * supervisor replaces. */
int shmq_directory_create(int fd, const shmq_limits *limits, const uint8_t *key);
/* Become the supervisor: store pid, start time, limits and doorbell in the directory's header, and
 * raise its epoch. */
int shmq_supervise(shmq_broker *b, const shmq_limits *limits, int64_t until);
/* Store the absolute path of the files in the directory, for readers of leases on disk. */
int shmq_data_path_set(shmq_broker *b, const char *path);
/* Store the errno with which the data path refuses writes; 0: it accepts them. */
void shmq_disk_trouble_set(shmq_broker *b, int error);
/* Reasons to ring the supervisor; bits. */
enum shmq_ring {
	SHMQ_RING_REQUEST = 1,
	SHMQ_RING_SPILLER = 2,   /* the spiller has work */
	SHMQ_RING_LEFT = 4,      /* a client left */
	SHMQ_RING_CHANGED = 8,   /* topics, channels or pauses changed */
	SHMQ_RING_DEADLINE = 16, /* a message times out or is due before the scanner would look */
	SHMQ_RING_ALL = 31
};
/* Sleep on the supervisor's doorbell up to `deadline` (CLOCK_MONOTONIC ns), at most 1 s, and store
 * the heartbeat. why: the reasons for which it was rung, 0 if it was not. SHMQ_INTERRUPTED. */
int shmq_supervisor_wait(shmq_broker *b, int64_t deadline, uint32_t *why);
/* Mark a queue as needing the spiller and wake it, so that it need not scan every queue. Producers
 * and consumers do this internally; this function is the supervisor's own. */
void shmq_spiller_request(shmq_broker *b, uint32_t queue);
/* Fetch the queues that were marked since the last call. n: at least 64. Returns their number;
 * those that do not fit are left for the next call. */
uint32_t shmq_spiller_pending(shmq_broker *b, uint32_t *queues, uint32_t n);
/* Announce that the scanner sleeps until `deadline` (CLOCK_MONOTONIC ns) or `due` (CLOCK_REALTIME
 * ns). A process that makes a queue's next deadline or due time earlier rings SHMQ_RING_DEADLINE.
 * Look at the columns after this call. */
void shmq_scan_at(shmq_broker *b, int64_t deadline, int64_t due);
/* Announce that nsqd.dat is about to be replaced: its times of modification (ns), before and
 * after. */
void shmq_names_written(shmq_broker *b, uint64_t replaced, uint64_t written);
/* Begin to stop: from now on no client attaches and no request is taken. */
void shmq_supervisor_stopping(shmq_broker *b);
/* Mark the directory closed, as the last act before its name is unlinked: every handle answers
 * SHMQ_GONE from then on. */
void shmq_directory_close(shmq_broker *b);

/* ---- requests, topics, queues --------------------------------------------------------------- */

typedef struct shmq_request {
	uint32_t ticket, kind, client;
	char topic[80], channel[80];
	uint64_t numbers[2]; /* SHMQ_CREATE_STORE: max_keys, max_bytes */
} shmq_request;
/* Fetch a posted request. SHMQ_EMPTY: there is none. Frees abandoned requests on the way. */
int shmq_request_next(shmq_broker *b, int64_t until, shmq_request *out);
/* Answer a request with a status, and ring its client. why: for SHMQ_REFUSED, the reason, of which
 * the client's error has the first 158 bytes; it has a space. NULL: none. death: the next supervisor
 * serves the request, or finds the reason instead of its names, which is no name, and refuses it. */
void shmq_request_answer(shmq_broker *b, uint32_t ticket, int status, const char *why);

/* Enter a topic whose message ids begin above `clock_floor` (clock of an id, in units of 64 ns), or
 * find the one that exists. settings: of the queues that it gets later; NULL: nsqd's rules and no
 * others. SHMQ_BAD_NAME, SHMQ_TABLE_FULL, SHMQ_NO_SPACE, SHMQ_INVALID. death: it exists or it does
 * not. */
int shmq_topic_create(shmq_broker *b, const char *name, uint64_t clock_floor,
                      const shmq_settings *settings, int64_t until, uint32_t *topic,
                      uint32_t *generation);
/* The size of a queue segment in bytes. */
uint64_t shmq_queue_bytes(const shmq_limits *limits);
/* Find a free queue index, and draw a new serial for the segment's name. SHMQ_TABLE_FULL,
 * SHMQ_NO_SPACE. death: a serial is lost. */
int shmq_queue_reserve(shmq_broker *b, int64_t until, uint32_t *queue, uint64_t *serial);
typedef struct shmq_queue_spec {
	uint32_t queue, topic;
	uint64_t serial;
	const char *base;                           /* base name of its files */
	uint64_t disk_read, disk_write, disk_depth; /* positions, and the messages between them */
	bool ephemeral, paused;
	const shmq_settings *settings; /* NULL: nsqd's rules and no others */
} shmq_queue_spec;
/* Make a new queue segment of the empty shared memory object `fd`, as shmq_directory_create. */
int shmq_queue_create(shmq_broker *b, int fd, const shmq_queue_spec *spec);
/* Enter the queue in the directory; channel NULL: as a backlog. One store makes it visible.
 * SHMQ_BAD_NAME; SHMQ_INVALID: the topic has this channel or a backlog, or the entry is taken.
 * death: it is entered or it is not. */
int shmq_queue_enter(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t topic,
                     const char *channel, int64_t until);
/* Turn the topic's backlog into its first channel, with everything in it. SHMQ_GONE: there is no
 * backlog; SHMQ_INVALID: the topic is paused or has a channel. `base_pending` is set: rename the
 * files, then call shmq_queue_renamed. death: the queue is the backlog or the channel. */
int shmq_queue_take_over(shmq_broker *b, uint32_t topic, const char *channel,
                         const shmq_settings *settings, int64_t until, uint32_t *queue,
                         uint64_t *serial);
/* Store the new base name of the files, and allow spills again. */
int shmq_queue_renamed(shmq_broker *b, uint32_t queue, const char *base, int64_t until);
/* Take the queue out of the directory, mark its segment CLOSED, and wake everybody (SHMQ_GONE).
 * Unlink its name afterwards. was_closed: a removal that died has closed the segment already, so
 * it cannot be mapped any more. death: the entry is DELETING; call this again. */
int shmq_queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed,
                      int64_t until);
/* The same for a queue whose files are to be deleted: its entry stays, ERASING, so that a successor
 * deletes them if the caller dies. Then call shmq_queue_remove. idle: only if the queue has no
 * consumer. This is decided under its deliver lock (D), so a consumer that opens meanwhile either
 * finds the queue gone or keeps it. erased: false if it has a consumer, or if another thread holds D
 * just now. death: the entry is LIVE or ERASING. */
int shmq_queue_erase(shmq_broker *b, uint32_t queue, uint64_t serial, bool idle, int64_t until,
                     bool *erased);
/* Remove a topic. SHMQ_INVALID: it still has a queue. */
int shmq_topic_remove(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until);

/* ---- deadlines ------------------------------------------------------------------------------ */

/* One bounded step of nsqd's scan. */
typedef struct shmq_expiry {
	int64_t now;      /* CLOCK_MONOTONIC ns; time-outs before it have come */
	int64_t realtime; /* CLOCK_REALTIME ns; due times before it have come */
	uint32_t limit;   /* most messages to move */
} shmq_expiry;
/* Move messages whose time-out or due time has come to the requeue ring; return the leases whose
 * time is over; and correct the queue's next_deadline and next_due columns. expired, due: how many
 * messages of each kind were moved. A convicted message is left where it is. */
int shmq_expire(shmq_broker *b, uint32_t queue, const shmq_expiry *step, int64_t until,
                uint32_t *expired, uint32_t *due);

/* Returns true if, when shmq_expire last looked, a convicted message waited to be moved. It holds up
 * the deferred messages of its queue until shmq_dead_move or shmq_dead_postpone. */
bool shmq_dead_waiting(shmq_broker *b, uint32_t queue);
/* Let up to n convicted messages that cannot be moved now wait until `due` (CLOCK_REALTIME ns).
 * count: how many. death: each waits, or it does not. */
int shmq_dead_postpone(shmq_broker *b, uint32_t queue, int64_t due, uint32_t n, int64_t until,
                       uint32_t *count);

/* A sweep under way. All zeros: it begins. */
typedef struct shmq_sweep {
	int64_t now, earliest;
	uint32_t step, next, expired;
	bool within;
} shmq_sweep;
#define SHMQ_SWEPT 5u /* the step after which nothing is left to do */

/* Do one bounded step of dropping the messages of a queue that have expired, wherever they wait.
 * Repeat until `step` is SHMQ_SWEPT; `expired` then is their number. death: each message is
 * there, or dropped and counted; the queue's next adoption sweeps again. */
int shmq_sweep_expired(shmq_broker *b, uint32_t queue, int64_t until, shmq_sweep *sweep);

/* ---- overflow ------------------------------------------------------------------------------- */

/* Keep the oldest n READY messages in memory when a queue overflows: move them to the requeue ring,
 * which comes before the disk. moved: how many there were room for. */
int shmq_stage_oldest(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved);
/*
 * Spill, in three calls.
 *
 * begin marks up to n messages (at most max_bytes of records) SPILLING and reports the lengths of
 * their records (4 + 26 + body). The caller gives each record its disk position. encode writes the
 * records, one after the other, into `buffer`. end stores the write position and frees the slots;
 * with ok = false, or if a slot is no longer SPILLING (the queue was emptied: SHMQ_GONE), it gives
 * them back.
 * death: records below the stored write position are on disk, the other messages are still in
 * memory (an adoption gives them their previous state).
 *
 *   source         which messages                                  where they are written
 *   READY          the oldest of the ready ring: overflow          at the write position
 *   ALL            in flight, requeue ring, ready ring: a flush    at the write position
 *   PREPEND_FLUSH  in flight, requeue ring: a flush while          before the read position
 *                  messages are on disk
 *   PREPEND        at the end of the requeue ring, those that      before the read position
 *                  wait for no others: room for deferred messages
 *   REQUEUED       the youngest of the requeue ring that wait for  at the write position
 *                  others anyway (timed out, due, requeued): the
 *                  same
 *   DELIVERED      as REQUEUED, and those that wait for no others  at the write position
 *                  but were delivered before: the same, if
 *                  PREPEND does not fit
 *   CHUNK          deferred messages (shmq_chunk_begin)            in a chunk
 *
 * Before REQUEUED and DELIVERED, spill the messages that must not come after those.
 *
 * PREPEND_FLUSH and PREPEND write right before the read position, over records that have been read.
 * `position` is where the first record goes: in the file of the read position, or, if nothing of
 * that file has been read yet, at the start of the file before it, which the records then fill
 * alone. end stores `position` as the read position and ignores write_position. Both ignore
 * max_bytes.
 * death: records at or after the stored read position are on disk, the others are still in memory.
 * PREPEND_FLUSH takes all messages or, if they would reach beyond the start of the file and there
 * is a file before it, the youngest part of them. SHMQ_FULL: neither fits. SHMQ_EMPTY: nothing is
 * on disk. PREPEND takes as many as fit, also if nothing is on disk. It takes nothing from clients,
 * and does nothing while a lease reaches to the disk. SHMQ_EMPTY: nothing can be moved.
 *
 * Example of PREPEND. The requeue ring holds 7 and 9, which were delivered before, then 3 and 4,
 * which were read from disk and never delivered; the disk begins at 5. 3 and 4 lie right before 5
 * in the file, so they can be written back there: the disk begins at 3 then, and the order stays.
 */
enum shmq_spill_source {
	SHMQ_SPILL_READY = 0,
	SHMQ_SPILL_ALL = 1,
	SHMQ_SPILL_PREPEND_FLUSH = 2,
	SHMQ_SPILL_CHUNK = 3,
	SHMQ_SPILL_REQUEUED = 4,
	SHMQ_SPILL_PREPEND = 5,
	SHMQ_SPILL_DELIVERED = 6
};
typedef struct shmq_spill {
	uint32_t queue, count;
	uint64_t bytes;    /* of all records */
	uint32_t *slots;   /* the caller's arrays, n entries each */
	uint32_t *lengths; /* record lengths */
	/* Filled by the caller before end: the position of each record. CHUNK: filled by begin with the
	 * due times. PREPEND_FLUSH, PREPEND: not used. */
	uint64_t *positions;
	enum shmq_spill_source source;
	uint64_t position; /* PREPEND_FLUSH, PREPEND: of the first record; CHUNK: the chunk's number */
} shmq_spill;
int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_source source, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out);
int shmq_spill_encode(shmq_broker *b, const shmq_spill *s, void *buffer);
int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until);
/* Bytes of a record before its body: 4 length, 8 timestamp, 2 attempts, 16 id. */
#define SHMQ_RECORD_HEAD 30u
/* The properties of exactly `count` records, as shmq_lease_properties. SHMQ_CORRUPT: they are not
 * exactly that. */
int shmq_records_properties(const void *records, uint64_t length, uint32_t count, uint64_t *size,
                            const shmq_blocks *to);
/* Separate the `length` bytes that a record has in its body's place: the properties, and the body.
 * Both point into `data`. */
void shmq_record_split(const void *data, uint64_t length, shmq_body *properties, shmq_body *body);
/* Write the record of a message of which a copy of its slot and the bytes of its properties and
 * body are left. key: of the instance, for the tag of one that is sealed; NULL: it loses its seal.
 * topic: its topic's name. to: NULL to ask for the size. Returns the size. */
uint64_t shmq_slot_record(const void *slot, const void *content, uint64_t length,
                          const uint8_t *key, const char *topic, void *to);
/* By how many bytes a record's body may exceed max_msg_size: shmq's own entries beside it. */
#define SHMQ_RECORD_MORE 96u
/* Decode `length` bytes that are exactly `count` records into columns for `count` messages and
 * length - SHMQ_RECORD_HEAD * count bytes of bodies. SHMQ_CORRUPT: they are not exactly that. */
int shmq_records_decode(const void *records, uint64_t length, uint32_t count,
                        const shmq_columns *to);
/* Count the whole records at the start of `data`, up to `most`, and the bytes that they use.
 * damaged: the length of the next record is impossible. */
int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t most,
                      uint32_t *records, uint64_t *used, bool *damaged);
/* Count the records at the start of `data`, which are whole, that may be leased where they are: up to
 * the first that expires by itself or was convicted, because those are to be looked at again when they
 * are handed out, and with bodies of at most max_bytes. at_least: one, whatever its body has. bytes: of
 * their bodies; used: of the records. */
void shmq_records_leasable(const void *data, uint64_t length, uint64_t max_bytes, bool at_least,
                           uint32_t *records, uint64_t *bytes, uint64_t *used);
/* Whole records as they were read from the segment files. */
typedef struct shmq_records {
	const void *data;
	uint64_t length;
	uint64_t position;      /* of the first record */
	uint64_t next_position; /* of what follows the last one; may be in the next file */
} shmq_records;
/*
 * Restore records into the requeue ring, as many as fit: `taken` of them, `used` bytes. The read
 * position becomes next_position if all were taken, else position + used. SHMQ_GONE: the read
 * position is no longer `position` (emptied).
 * death: RESTORED slots below the read position become REQUEUED, the others FREE.
 */
int shmq_restore(shmq_broker *b, uint32_t queue, const shmq_records *records, int64_t until,
                 uint32_t *taken, uint64_t *used);
/* Move the read position past damage or to the next file. from: where it must be now, else
 * SHMQ_GONE; depth: the number of messages on disk as recounted. */
int shmq_disk_set(shmq_broker *b, uint32_t queue, uint64_t from, uint64_t read_position,
                  uint64_t depth, int64_t until);
/* Adopt files that another broker has used meanwhile: the `depth` messages between these positions
 * are on disk, and every chunk up to `chunk` counts. Messages in memory stay, but lose the
 * positions from which they were read. */
int shmq_disk_adopt(shmq_broker *b, uint32_t queue, uint64_t read_position, uint64_t write_position,
                    uint64_t depth, uint64_t chunk, int64_t until);
/* Drop messages that were read ahead from the present read file and never delivered, by lowering
 * the read position: for a flush, or because a publisher needs their room. count: how many. death:
 * each message is in memory or on disk. */
int shmq_evict_read_ahead(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count);

/* Give the pages after the last body in use back to the system, for a queue that has been nearly
 * empty for a while; it grows again when needed. bytes: by how much the arena shrank. death: the
 * arena is as large as before, or it is smaller and the next trim gives its pages back. */
int shmq_trim(shmq_broker *b, uint32_t queue, int64_t until, uint64_t *bytes);

/* ---- deferred messages on disk -------------------------------------------------------------- */

/*
 * A chunk holds at most 2^24 deferred messages with their due times (CLOCK_REALTIME ns). Its number
 * was never used in this queue before.
 */
typedef struct shmq_chunk_wish {
	uint64_t chunk;     /* its number */
	int64_t from_due;   /* only messages that are due then or later */
	uint64_t max_bytes; /* most bytes of records */
	uint32_t n;         /* most messages */
} shmq_chunk_wish;
/*
 * Out: begin marks DEFERRED slots SPILLING as wished, by due time. encode works as for a spill; the
 * caller writes the whole chunk; shmq_spill_end stores its number as deferred_write and frees the
 * slots, or gives them back. SHMQ_EMPTY: no message is due then.
 * death: they are on disk if the number is not above deferred_write, else still in memory.
 */
int shmq_chunk_begin(shmq_broker *b, uint32_t queue, const shmq_chunk_wish *wish, int64_t until,
                     shmq_spill *out);
typedef struct shmq_chunk_records {
	const void *data; /* the next n records of a chunk, as on disk */
	uint64_t length;
	const int64_t *dues; /* their n due times */
	uint32_t n;
	uint64_t position; /* chunk << 24 | number of the first one in the chunk */
} shmq_chunk_records;
/*
 * In: load messages of a chunk. taken: as many as fit; deferred_read is then position + taken.
 * SHMQ_GONE: the chunk was emptied. deferred_read remembers one chunk only: before this call the
 * caller records in the name of the other chunk's file how far that was read.
 * death: messages before deferred_read of its chunk are DEFERRED in memory, the others still on
 * disk.
 */
int shmq_chunk_load(shmq_broker *b, uint32_t queue, const shmq_chunk_records *records,
                    int64_t until, uint32_t *taken);
/* Set how many messages are in chunks, as recounted. */
int shmq_chunk_depth(shmq_broker *b, uint32_t queue, uint64_t depth, int64_t until);
/* Let a new segment begin with chunks: store the highest number and the number of messages. Call it
 * before the queue is entered. */
int shmq_chunk_start(int fd, uint64_t highest, uint64_t depth);

/* ---- backlogs, adoption, repair ------------------------------------------------------------- */

/* Move up to n messages of an unpaused topic's backlog to its channels. SHMQ_EMPTY: nothing is
 * left; SHMQ_FULL: a channel lacks room. death: each message is in the backlog or in all
 * channels. */
int shmq_pump(shmq_broker *b, uint32_t topic, uint32_t generation, uint32_t n, int64_t until,
              uint32_t *moved);
/* Adopt a queue, as a new supervisor's first act: give the slots that the dead supervisor was
 * spilling their previous state, and rebuild. */
int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until);
/* Throw away a queue's derived state and rebuild it, under both locks. */
int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until);
/* Check, mostly from a few words, that every slot is in a ring, in a heap or held; rebuild if one
 * is not, because then something has overwritten derived state unnoticed. repaired: it was
 * rebuilt. */
int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired);

/* ---- reaper --------------------------------------------------------------------------------- */

typedef struct shmq_dead {
	uint32_t client, generation;
	int32_t pid;
	uint32_t reserved;
	uint64_t start_time, program;
} shmq_dead;
/* Try every `life` lock, and list up to n clients whose thread or process has ended. */
int shmq_reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found);
/* Repeat that every `every` ns until it finds some, `fd` (-1: none) becomes readable, a signal
 * arrives, or `until`; less often while no client is attached. */
int shmq_reap_wait(shmq_broker *b, int fd, int64_t every, int64_t until, shmq_dead *out, uint32_t n,
                   uint32_t *found);
/* Keep an entry whose thread has ended while its process lives; from now on the supervisor watches
 * the process. */
void shmq_reap_spare(shmq_broker *b, uint32_t client, uint32_t generation);
/* Give back everything that a dead client held, and free its entry last. returned: the number of
 * messages. SHMQ_GONE: the entry is not this client's any more. death: call it again. */
int shmq_reap(shmq_broker *b, uint32_t client, uint32_t generation, int64_t until,
              uint32_t *returned);

#ifdef __cplusplus
}
#endif
#endif

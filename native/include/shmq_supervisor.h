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

/* Size of a directory segment in bytes. */
uint64_t shmq_directory_bytes(void);
/* Size, reserve and fill a new directory behind `fd` (an empty object); READY is stored last.
 * SHMQ_NO_SPACE on a full tmpfs, SHMQ_NO_MEMORY if it cannot be mapped. death: a raw segment, which
 * no opener accepts and the next supervisor replaces. */
int shmq_directory_create(int fd, const shmq_limits *limits);
/* Become the supervisor: pid, start time, epoch and doorbell into the directory's header. */
int shmq_supervise(shmq_broker *b, const shmq_limits *limits, int64_t until);
/* Publish where the files are (an absolute path), for readers of leases on disk. */
int shmq_data_path_set(shmq_broker *b, const char *path);
/* Say with which errno the data path refuses to be written; 0: it does not (any more). */
void shmq_disk_trouble_set(shmq_broker *b, int error);
/* Sleep on the supervisor's doorbell, and store the heartbeat. `why` has bits: 1 a request, 2
 * work for the spiller, 4 a client left, 8 topics, channels or pauses changed, 16 a message
 * times out or is due before the scanner would look. */
int shmq_supervisor_wait(shmq_broker *b, int64_t deadline, uint32_t *why);
/* Mark a queue as needing the spiller and wake it, so that it need not scan every queue.
 * Producers and consumers do this internally; this entry point is the supervisor's own. */
void shmq_attend(shmq_broker *b, uint32_t queue);
/* The queues marked since the last call. Returns their number; room for n >= 64 indices, the
 * rest is left for the next call. */
uint32_t shmq_attention(shmq_broker *b, uint32_t *queues, uint32_t n);
/* Announce until when the scanner sleeps. A process that makes a queue's next deadline or due time
 * earlier than that rings 16. Look at the columns after this call. */
void shmq_scan_at(shmq_broker *b, int64_t deadline, int64_t due);
/* Announce that nsqd.dat is about to be replaced: its times of modification (ns), before and
 * after. */
void shmq_names_written(shmq_broker *b, uint64_t replaced, uint64_t written);
/* From now on no client attaches and no request is taken. */
void shmq_supervisor_stopping(shmq_broker *b);
/* Mark the directory closed, as the last act before its name is unlinked: every handle answers
 * SHMQ_GONE from then on. */
void shmq_directory_close(shmq_broker *b);

/* ---- requests, topics, queues --------------------------------------------------------------- */

typedef struct shmq_request {
	uint32_t ticket, kind, client;
	char topic[80], channel[80];
} shmq_request;
/* The next posted request, or SHMQ_EMPTY. Frees abandoned requests on the way. */
int shmq_request_next(shmq_broker *b, int64_t until, shmq_request *out);
void shmq_request_answer(shmq_broker *b, uint32_t ticket, int status);

/* Enter a topic whose ids begin above `clock_floor` (64 ns units). Returns the index of one that
 * exists. */
int shmq_topic_create(shmq_broker *b, const char *name, uint64_t clock_floor, int64_t until,
                      uint32_t *topic, uint32_t *generation);
/* Size of a queue segment in bytes. */
uint64_t shmq_queue_bytes(const shmq_limits *limits);
/* Reserve a free queue index, and a new serial for the segment's name. */
int shmq_queue_reserve(shmq_broker *b, int64_t until, uint32_t *queue, uint64_t *serial);
/* Size, reserve and fill a new queue segment behind `fd`; as shmq_directory_create. */
int shmq_queue_create(shmq_broker *b, int fd, uint32_t queue, uint64_t serial, uint32_t topic,
                      const char *base, uint64_t disk_read, uint64_t disk_write,
                      uint64_t disk_depth, bool ephemeral, bool paused);
/* Enter the queue in the directory; channel NULL: as a backlog. One store makes it visible. */
int shmq_queue_enter(shmq_broker *b, uint32_t queue, uint64_t serial, uint32_t topic,
                     const char *channel, int64_t until);
/* Turn the topic's backlog into its first channel, with everything in it. SHMQ_GONE: there is no
 * backlog; SHMQ_INVALID: the topic is paused or has a channel. `base_pending` is set: rename the
 * files, then call shmq_queue_renamed. death: the queue is the backlog or the channel. */
int shmq_queue_take_over(shmq_broker *b, uint32_t topic, const char *channel, int64_t until,
                         uint32_t *queue, uint64_t *serial);
int shmq_queue_renamed(shmq_broker *b, uint32_t queue, const char *base, int64_t until);
/* Take the queue out of the directory, mark its segment CLOSED, and wake everybody (SHMQ_GONE).
 * Unlink its name afterwards. was_closed: a removal that died has closed the segment already, so
 * it cannot be mapped any more. death: the entry is DELETING; call this again. */
int shmq_queue_remove(shmq_broker *b, uint32_t queue, uint64_t serial, bool was_closed,
                      int64_t until);
/* Remove the queue unless it has a consumer. That is decided under its deliver lock (D), so a
 * consumer that opens meanwhile either finds the queue gone or keeps it. removed: false if it
 * has a consumer, or if D is held just now. */
int shmq_queue_remove_idle(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                           bool *removed);
int shmq_topic_remove(shmq_broker *b, uint32_t topic, uint32_t generation, int64_t until);

/* ---- deadlines ------------------------------------------------------------------------------ */

/* One bite of nsqd's scan: move at most `limit` expired and due messages to the requeue ring, and
 * correct the queue's next_deadline and next_due columns. */
int shmq_expire(shmq_broker *b, uint32_t queue, int64_t now, int64_t realtime, uint32_t limit,
                int64_t until, uint32_t *expired, uint32_t *due);

/* ---- overflow ------------------------------------------------------------------------------- */

/* Keep the oldest n READY messages in memory: move them to the requeue ring, unread. */
int shmq_advance(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved);
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
 *   READY      the oldest of the ready ring, to the write position: overflow
 *   ALL        in flight, requeue ring and ready ring, to the write position: a flush
 *   AHEAD      in flight and requeue ring, before the read position: a flush with messages on disk
 *   RETURNED   the youngest of the requeue ring that wait for others anyway (timed out, due,
 *              requeued), to the write position: room for deferred messages
 *   FRONT      the others at the end of the requeue ring, before the read position: the same
 *   OUT        as RETURNED, and those that wait for nobody but were handed out before: the same, if
 *              FRONT does not fit
 *   CHUNK      deferred messages, to a chunk (shmq_chunk_begin)
 *
 * Before RETURNED, spill whatever must not come after those messages.
 *
 * AHEAD and FRONT write in front of the read position, where everything has been read. `position`
 * is where the first record goes: in the file of the read position, or, if nothing of that file has
 * been read yet, at the start of the file before it, which the records then fill alone. end stores
 * `position` as the read position and ignores write_position. Both ignore max_bytes.
 * death: records at or after the stored read position are on disk, the others are still in memory.
 * AHEAD takes all messages or, if they would reach beyond the start of the file and there is a file
 * before it, the youngest part of them. SHMQ_FULL: neither fits. SHMQ_EMPTY: nothing is on disk.
 * FRONT takes as many as fit, also if nothing is on disk. It takes nothing from clients, and does
 * nothing while a lease reaches to the disk. SHMQ_EMPTY: nothing can be moved.
 *
 * Example of FRONT. The requeue ring holds 7 and 9, which were handed out before, then 3 and 4,
 * which were read from disk and never handed out; the disk begins at 5. 3 and 4 lie right in front
 * of 5 in the file, so they can be written back there: the disk begins at 3 then, and the order
 * stays.
 */
enum shmq_spill_from {
	SHMQ_SPILL_READY = 0,
	SHMQ_SPILL_ALL = 1,
	SHMQ_SPILL_AHEAD = 2,
	SHMQ_SPILL_CHUNK = 3, /* shmq_chunk_begin */
	SHMQ_SPILL_RETURNED = 4,
	SHMQ_SPILL_FRONT = 5,
	SHMQ_SPILL_OUT = 6
};
typedef struct shmq_spill {
	uint32_t queue, count;
	uint64_t bytes;      /* of all records */
	uint32_t *slots;     /* the caller's arrays, n entries each */
	uint32_t *lengths;   /* record lengths */
	uint64_t *positions; /* READY, ALL, RETURNED, OUT: from the caller, before end;
	                        CHUNK: due times, from begin */
	enum shmq_spill_from from;
	uint64_t position;   /* AHEAD, FRONT: of the first record; CHUNK: its number */
} shmq_spill;
int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_from from, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out);
int shmq_spill_encode(shmq_broker *b, const shmq_spill *s, void *buffer);
int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until);
/* Decode `count` whole records, and nothing else, into columns as shmq_lease_copy has them.
 * `attempts` counts the delivery that this is; data: length - 30 * count bytes. SHMQ_CORRUPT. */
int shmq_records_decode(const void *records, uint64_t length, uint32_t count, uint64_t *ids,
                        int64_t *timestamps, int32_t *attempts, int32_t *offsets, uint8_t *data);
/* Count the whole records in `data`, up to `most`, and their bytes. damaged: the length of the
 * next one is impossible. */
int shmq_records_scan(const void *data, uint64_t length, uint64_t max_msg_size, uint32_t most,
                      uint32_t *records, uint64_t *used, bool *damaged);
/*
 * Restore records that were read from disk at `position` into the requeue ring, as many as fit:
 * `taken` of them, `used` bytes. The read position becomes next_position if all were taken (that
 * may be in the next file), else position + used. SHMQ_GONE: the read position is no longer
 * `position` (emptied).
 * death: RESTORED slots below the read position become BACK, the others FREE.
 */
int shmq_restore(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                 uint64_t position, uint64_t next_position, int64_t until, uint32_t *taken,
                 uint64_t *used);
/* Move the read position over damage or to the next file, if it still is `from`; `depth` as
 * recounted. */
int shmq_disk_set(shmq_broker *b, uint32_t queue, uint64_t from, uint64_t read_position,
                  uint64_t depth, int64_t until);
/* Adopt files that another broker has used since: what lies between these positions is on disk, and
 * every chunk up to `chunk` counts. Messages in memory stay, but have no place on disk any more. */
int shmq_disk_adopt(shmq_broker *b, uint32_t queue, uint64_t read_position, uint64_t write_position,
                    uint64_t depth, uint64_t chunk, int64_t until);
/* Drop messages that were read ahead from the present read file and never delivered, by lowering
 * the read position: for a flush, and where a publisher needs their room. `count` of them. */
int shmq_unrestore(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count);

/* Give the pages after the last body in use back to the system. bytes: how much smaller the
 * arena is. For a queue that has been nearly empty for a while; it grows again as it did at
 * first. death: the arena is as large as before, or smaller and its pages are given back next
 * time. */
int shmq_give_back(shmq_broker *b, uint32_t queue, int64_t until, uint64_t *bytes);

/* ---- deferred messages on disk -------------------------------------------------------------- */

/*
 * A chunk holds deferred messages with their due times (CLOCK_REALTIME ns). Its number was never
 * used in this queue before; it has at most 2^24 messages.
 *
 * Out: begin marks up to n DEFERRED slots that are due at `from_due` or later SPILLING, by due
 * time. encode as for a spill; the caller writes the whole chunk; shmq_spill_end stores its number
 * as deferred_write and frees the slots, or gives them back.
 * death: they are on disk if the number is not above deferred_write, else still in memory.
 */
int shmq_chunk_begin(shmq_broker *b, uint32_t queue, uint64_t chunk, int64_t from_due, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out);
/*
 * In: load the next n messages of a chunk, records as on disk and their due times. position: chunk
 * << 24 | number of the first one in it. As many as fit: `taken`; deferred_read is then position +
 * taken. SHMQ_GONE: the chunk was emptied. Before this call the caller makes certain that what
 * deferred_read says of another chunk is known from that chunk's file name.
 * death: messages before deferred_read of its chunk are DEFERRED in memory, the others still on
 * disk.
 */
int shmq_chunk_load(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                    const int64_t *dues, uint32_t n, uint64_t position, int64_t until,
                    uint32_t *taken);
/* Set how many messages are in chunks, as recounted. */
int shmq_chunk_depth(shmq_broker *b, uint32_t queue, uint64_t depth, int64_t until);
/* Begin a new segment with chunks: the highest number, how many messages. Call it before its
 * queue is entered. */
int shmq_chunk_start(int fd, uint64_t highest, uint64_t depth);

/* ---- backlogs, adoption, repair ------------------------------------------------------------- */

/* Move up to n messages of an unpaused topic's backlog to its channels. SHMQ_EMPTY: nothing is
 * left; SHMQ_FULL: a channel lacks room. death: each message is in the backlog or in all
 * channels. */
int shmq_pump(shmq_broker *b, uint32_t topic, uint32_t generation, uint32_t n, int64_t until,
              uint32_t *moved);
/* Adopt a queue, as a new supervisor's first act: resolve what the dead supervisor left,
 * rebuild. */
int shmq_adopt(shmq_broker *b, uint32_t queue, int64_t until);
/* Throw away what is derived and rebuild it, under both locks. */
int shmq_rebuild(shmq_broker *b, uint32_t queue, int64_t until);
/* Check that every slot is in a ring, a heap or a hand, from a few words; rebuild if one is not
 * (then something has overwritten derived state unnoticed). SHMQ_CORRUPT as all others. */
int shmq_audit(shmq_broker *b, uint32_t queue, int64_t until, bool *repaired);

/* ---- reaper --------------------------------------------------------------------------------- */

typedef struct shmq_dead {
	uint32_t client, generation;
	int32_t pid;
	uint32_t reserved;
	uint64_t start_time, program;
} shmq_dead;
/* Try every `life` lock: the clients whose thread or process ended (n: capacity of `out`). */
int shmq_reap_scan(shmq_broker *b, shmq_dead *out, uint32_t n, uint32_t *found);
/* Repeat that every `every` ns until it finds some, `fd` (-1: none) becomes readable, a signal
 * comes or `until`; less often while no client is attached. */
int shmq_reap_wait(shmq_broker *b, int fd, int64_t every, int64_t until, shmq_dead *out, uint32_t n,
                   uint32_t *found);
/* Keep an entry whose thread ended while its process lives; from now on its pid is watched. */
void shmq_reap_spare(shmq_broker *b, uint32_t client, uint32_t generation);
/* Give back everything that a dead client held; free its entry last. death: call it again. */
int shmq_reap(shmq_broker *b, uint32_t client, uint32_t generation, int64_t until,
              uint32_t *returned);

#ifdef __cplusplus
}
#endif
#endif

/*
 * A topic with one to three channels on which actors act at the same time: what they do, what
 * becomes of each message, and the plays made of it.
 */
#ifndef STAGE_H
#define STAGE_H

#include "schedule.h"

#define CHECK(condition) ((condition) ? (void)0 : schedule_fail("%s: not %s", __func__, #condition))
#define EQUAL(x, y)                                                                                \
	do {                                                                                           \
		long long x_ = (long long)(x), y_ = (long long)(y);                                        \
		if (x_ != y_)                                                                              \
			schedule_fail("%s: %s is %lld, not %lld", __func__, #x, x_, y_);                       \
	} while (0)
#include "harness.h"

#include <stdio.h>

#define MESSAGES 64u
#define EACH 12u /* numbers a publisher has */
#define QUEUES 3u
#define BODY 24u
#define EARLY ACTORS /* the publisher of what is there before the actors begin */

enum published { NOT, BEGUN, RETURNED, REFUSED };

/* AWAY: by somebody else than the message's consumer, perhaps. */
enum finished { OPEN, BEGUN_TO, TAKEN, AWAY };

typedef struct actor {
	shmq_broker *b;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m[16];
	uint32_t number[16]; /* of the message; MESSAGES: it was gone before it was read */
	uint32_t got, next;
} actor;

/* In the heap that every run finds as it was. */
typedef struct stage {
	world *w;
	uint32_t topic, generation;
	uint32_t n, queue[QUEUES], targets;
	uint64_t serial[QUEUES];
	shmq_map *seen[QUEUES];
	actor actors[ACTORS + 1];
	uint8_t published[MESSAGES], group[MESSAGES], finished[QUEUES][MESSAGES];
	bool dropped[QUEUES]; /* its messages may be gone: emptied, or removed */
	bool late[QUEUES];    /* it came later: may lack what was published before */
	bool out_of_order, adopt, pumps, leases;
	shmq_lease_holder holder;
	shmq_lease lease;
	uint32_t leased[16]; /* numbers of the messages in it */
	shmq_spill spill;
	uint32_t slots[64], lengths[64];
	uint64_t positions[64], written, chunk_bytes;
	int64_t chunk_dues[16];
	uint32_t chunk_lengths[16], chunk_count;
	uint8_t disk[16384], chunk[2048];
} stage;

extern stage *k;

typedef struct play {
	void (*begin)(void);
	scenario s;
} play;

/* `begin` sets up; then come the acts of the actors 0 to 3, NULL for none. */
#define PLAY(name, begin, ...)                                                                     \
	{                                                                                              \
		begin,                                                                                     \
		{                                                                                          \
			name, {__VA_ARGS__}, settle, verify, asleep                                            \
		}                                                                                          \
	}

typedef struct plays {
	const play *table;
	uint32_t count;
} plays;
extern const plays consume_plays, lanes_plays, spill_plays, lease_plays, supervisor_plays,
		dead_plays, limit_plays, store_plays;

/* ---- in stage.c ---- */

shmq_queue_desc *desc(uint32_t queue);
void body_make(uint8_t *body, uint32_t number);
uint32_t body_number(const shmq_message *m);
void publish(uint32_t who, uint32_t n, int64_t due);
int64_t in_an_hour(void);
int take(uint32_t who, uint32_t queue, uint32_t n);
void finish(uint32_t who, uint32_t queue, uint32_t n);
void take_and_wait(uint32_t who, uint32_t n);
void come(uint32_t who, enum shmq_kind kind);
void come_to_publish(uint32_t who);
void come_to_take(uint32_t who, uint32_t queue);
void come_to_supervise(uint32_t who);
uint32_t make_queue(const char *channel);
void begin(uint32_t channels);
void about_to_wrap(void);

/* ---- in verify.c ---- */

void settle(void);
bool asleep(uint32_t who);
bool load_chunk(shmq_broker *b);
void pump(shmq_broker *b);
void verify(void);

/* ---- in plays_consume.c ---- */

void publish_one_0(void);
void publish_batch_0(void);
void publish_deferred_0(void);
void take_one_1(void);
void take_two_1(void);
void finish_1(void);
void requeue_1(void);
void touch_1(void);
void close_1(void);
void wait_1(void);
void begin_in_flight(void);
void empty_2(void);
void loan_and_commit_0(void);
void begin_with_supervisor(void);
void begin_taken(void);
void take_other_1(void);
void finish_rest_1(void);

/* ---- in plays_spill.c ---- */

void spill_3(void);
void flush_3(void);
void restore_3(void);
void prepend_flush_3(void);
void prepend_3(void);
void expire_3(void);
void begin_read_half_to_lease(void);

/* ---- in plays_lease.c ---- */

void come_to_lease(void);

/* ---- in plays_supervisor.c ---- */

void adopt_3(void);
void rebuild_2(void);
void rebuild_3(void);
void reap_3(void);
void begin_one_died(void);

#endif

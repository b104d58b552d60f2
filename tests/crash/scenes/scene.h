/*
 * The scene in which an operation is killed: a broker of anonymous files, a client that lives
 * through it all, and the ledger in which each process writes what the others may rely on: the
 * uncertain word before a call, the certain one after it. It acts through shmq.h only.
 */
#ifndef SCENE_H
#define SCENE_H

#include "memory/layout.h"
#include "shmq.h"
#include "shmq_supervisor.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/types.h>

#define FILES 8u         /* 0: the directory; 1 to 6: queues, by serial; 7: another directory */
#define SPAN (32u << 20) /* of address space for each, more than any grows to */
#define QUEUES 4u
#define MESSAGES 64u
#define SMALL 30u
#define LARGE 600u /* over this build's SHMQ_LARGE */
#define SECOND INT64_C(1000000000)

_Static_assert(SHMQ_SLOTS_FIRST == 16 && SHMQ_TRANSIT <= 16 && SHMQ_LARGE < LARGE,
               "the core must be built for queues of 16 slots");

typedef struct files {
	int fd[FILES];
	uint8_t *map[FILES]; /* SPAN bytes; only what the file has may be touched */
} files;

/* How often a message is to be delivered on a queue. */
enum fate {
	NEVER,  /* not here */
	DUE,    /* exactly once */
	EITHER, /* being finished or dropped: once or not at all */
	DONE,   /* finished, dropped: never again */
	GROUP   /* being published: with all of its batch, on all queues, or not at all */
};

/* Whether a sealed producer has published a message. */
enum sealing {
	UNSEALED,
	SEALED,
	FORGED /* it is on disk with a wrong tag: from there it comes back unsealed */
};

typedef struct ledger {
	uint8_t fate[QUEUES][MESSAGES];
	uint8_t batch[MESSAGES];   /* number of the first message of its batch */
	int64_t due[MESSAGES];     /* CLOCK_REALTIME ns before which it is not delivered; 0: at once */
	uint8_t with[MESSAGES];    /* 1: the message has properties (properties_make) */
	bool properties;           /* so have those that are published from now on */
	uint8_t sealed[MESSAGES];  /* enum sealing */
	bool seal;                 /* those that are published from now on are sealed */
	uint32_t next;             /* number of the next message */
	uint32_t queues;           /* how many */
	uint32_t targets, leaving; /* bits of those that a publish reaches; that are being deleted */
	uint32_t takers; /* that took messages: if one dies while another has some, order ends */
	/* queue 0 is a backlog on its way to 1 and 2: its fates are those of either place */
	bool moves;
	/* messages are on their way from queue 0 to queue 1, that of the topic `dead`, or back: their fates
	 * on queue 0 are those of either place */
	bool carries;
	shmq_dead_target dead;
	struct {
		uint32_t index;
		uint64_t serial;
	} queue[QUEUES];
	uint64_t new_serial; /* being made */
	uint32_t new_index;
	uint32_t once;    /* number of the first message that is published with a sequence; 0: none */
	uint64_t written; /* bytes of the disk file 0 of queue 0 */
	uint8_t disk[4096];
	uint32_t chunk_count, chunk_lengths[8]; /* chunk 1 of queue 0 */
	int64_t chunk_dues[8];
	uint8_t chunk[1024];
} ledger;

typedef struct operation operation;

typedef struct scene {
	const operation *operation;
	files *files;
	ledger *ledger; /* shared with the process that is killed */
	shmq_limits limits;
	uint32_t topic, generation;
	shmq_broker *home;  /* a supervisor that lives through it all */
	shmq_broker *alive; /* and a client */
	shmq_producer *producer;
	shmq_consumer *consumer; /* of queue 0; what it holds is given back when it dies */
	/* of the process that is killed */
	shmq_broker *mine;
	shmq_producer *my_producer;
	shmq_consumer *my_consumer;
	shmq_message m[64];
	uint32_t got;
	shmq_loan *loan;
	shmq_lease_holder holder;
	shmq_lease lease;
	shmq_spill spill;
	uint32_t spill_slots[64], spill_lengths[64]; /* what `spill` points to */
	uint64_t spill_positions[64];
} scene;

struct operation {
	const char *name;
	uint32_t channels;        /* made before; 0: a backlog */
	void (*prepare)(scene *); /* by the clients that live on, before */
	void (*ready)(scene *);   /* by the process that is killed, before it is watched */
	void (*act)(scene *);     /* the operation, killed anywhere in its calls */
	void (*after)(scene *);   /* by the clients that live on, after the repair */
	bool supervisor;          /* the dead was the supervisor: its queues are adopted */
	bool out_of_order;        /* the order of messages is not promised */
	bool alone;               /* only `after` judges */
};

/* ---- being watched ---- */

/* In the process that acts: between these two the tracer counts instructions. */
void watch_begin(void);
void watch_end(void);
void watch_over(void); /* the operation is complete; never returns */
extern bool watched;

/* Evaluate a call of shmq.h under the tracer's eyes. */
#define WATCHED(call)                                                                              \
	({                                                                                             \
		watch_begin();                                                                             \
		__typeof__(call) w_ = (call);                                                              \
		watch_end();                                                                               \
		w_;                                                                                        \
	})
/* The same again as long as it asks for a mapping. */
#define CALL(s, b, call)                                                                           \
	({                                                                                             \
		int c_;                                                                                    \
		while ((c_ = WATCHED(call)) == SHMQ_NEED_MAP)                                              \
			map_missing(s, b);                                                                     \
		c_;                                                                                        \
	})

/* ---- what went wrong ---- */

/* Store the sentence in wrong_words for the parent, and end the process. */
extern char *wrong_words; /* shared, WRONG bytes */
#define WRONG 512u
_Noreturn void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define CHECK(condition)                                                                           \
	do {                                                                                           \
		if (!(condition))                                                                          \
			wrong("%s:%d: not so: %s", __FILE__, __LINE__, #condition);                            \
	} while (0)
#define EQUAL(x, y)                                                                                \
	do {                                                                                           \
		long long x_ = (long long)(x), y_ = (long long)(y);                                        \
		if (x_ != y_)                                                                              \
			wrong("%s:%d: %s is %lld, not %lld", __FILE__, __LINE__, #x, x_, y_);                  \
	} while (0)

/* ---- in scene.c ---- */

/* Memory that children share with their parent. */
void *shared(size_t bytes);
void files_make(files *f);
/* A new broker with what the operation wants. */
void scene_make(scene *s, const operation *o, files *f, ledger *l);
int64_t soon(void);
void map_missing(scene *s, shmq_broker *b);
shmq_broker *attach(scene *s, enum shmq_kind kind);
/* Attach `mine`: a client with a producer, or a supervisor with all queues mapped. */
void come(scene *s);
void come_to_supervise(scene *s);
void supervise(scene *s, shmq_broker *b);
void adopt_all(scene *s, shmq_broker *b);
void reap_all(scene *s, shmq_broker *b);
uint32_t make_queue(scene *s, shmq_broker *b, const char *channel, uint64_t *serial);
void add_queue(scene *s, uint32_t index, uint64_t serial, bool target);
/* Publish n new messages, or (0, SHMQ_...) be refused. */
int try_publish(scene *s, shmq_broker *b, shmq_producer *p, uint32_t n, uint32_t length,
                int64_t due);
void publish(scene *s, shmq_broker *b, shmq_producer *p, uint32_t n, uint32_t length, int64_t due);
void finish(scene *s, uint32_t q, shmq_consumer *c, const shmq_message *m, uint32_t n);
shmq_consumer *consume(scene *s, shmq_broker *b, uint32_t q);
int64_t in_an_hour(void);
/* Read what is on disk, of queue q; the next `most` of the chunk (false: there are none). */
void restore(scene *s, shmq_broker *b, uint32_t q);
bool load_chunk(scene *s, shmq_broker *b, uint32_t most);
/* Of a batch, on every queue that a publish reaches. */
void set_fates(scene *s, uint32_t first, uint32_t n, enum fate fate);

/* The body of a message; and its number by its body, all of which is looked at; MESSAGES: it is
 * torn. */
uint8_t *body_make(uint32_t number, uint32_t length);
uint32_t body_number(const uint8_t *body, uint64_t length);
/* Its properties, if it has any: one, whose value is its number. */
#define PROPERTIES 5u
void properties_make(uint32_t number, uint8_t block[PROPERTIES]);
bool properties_are(const scene *s, uint32_t number, const uint8_t *block, uint64_t length);
/* A producer of the scene's topic, as those of the messages that are published now. */
shmq_producer *produce(const scene *s, shmq_broker *b);

/* ---- the bytes ---- */

static inline shmq_directory_desc *directory_of(const scene *s)
{
	return (shmq_directory_desc *)(void *)s->files->map[0];
}
static inline shmq_entry_desc *entries_of(const scene *s)
{
	return (shmq_entry_desc *)(void *)(s->files->map[0] + directory_of(s)->queues_at);
}
static inline shmq_topic_desc *topics_of(const scene *s)
{
	return (shmq_topic_desc *)(void *)(s->files->map[0] + directory_of(s)->topics_at);
}
static inline shmq_waiter_desc *waiters_of(const scene *s)
{
	return (shmq_waiter_desc *)(void *)(s->files->map[0] + directory_of(s)->waiters_at);
}
static inline shmq_client_desc *clients_of(const scene *s)
{
	return (shmq_client_desc *)(void *)(s->files->map[0] + directory_of(s)->clients_at);
}
static inline shmq_queue_desc *queue_of(const scene *s, uint32_t q)
{
	return (shmq_queue_desc *)(void *)s->files->map[s->ledger->queue[q].serial];
}
static inline bool queue_lives(const scene *s, uint32_t q)
{
	const shmq_entry_desc *e = &entries_of(s)[s->ledger->queue[q].index];

	return e->state == SHMQ_ENTRY_LIVE && e->serial == s->ledger->queue[q].serial;
}

#endif

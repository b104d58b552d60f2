/*
 * Garbage in shared memory while it is in use. Every word of both headers, the rings and heaps, the
 * slots, the tags and lists of the arena is overwritten, one after the other, with several kinds of
 * garbage; then every call is made. No call crashes, hangs or reaches beyond the segment: it does
 * its work, or answers SHMQ_CORRUPT or another status of shmq.h. The queue beside the damaged one
 * keeps all its messages. If the overwritten word is derived, the damaged queue loses nothing
 * either: all its messages are delivered.
 *
 * `--mutant`: the core believes all values (mutants/trust_everything.patch), and that must be
 * found.
 */
#include "scene_use.h"

#include <signal.h>

#define PIECE 500  /* cases of one child */
#define SECONDS 20 /* that a child may take */
#define ENOUGH 20  /* crashes that a mutant must show */

enum { DERIVED = 1, PRIMARY = 2 };

static struct place {
	const char *what;
	uint8_t *at;
	uint32_t bytes; /* from there, in words of 4 */
	int kind;
} places[64];
static uint32_t places_count;

static void place(const char *what, void *at, uint64_t bytes, int kind)
{
	places[places_count++] = (struct place){what, at, (uint32_t)bytes, kind};
}

#define HEADER(first, behind)                                                                      \
	&q->first, offsetof(shmq_queue_desc, behind) - offsetof(shmq_queue_desc, first)

static void list_places(void)
{
	shmq_map *m = s->map[0];
	shmq_queue_desc *q = m->q;
	shmq_directory_desc *d = s->b->d;

	place("segment", q, sizeof(q->segment), PRIMARY);
	place("made", HEADER(index, reserved0), PRIMARY);
	place("slots_committed", &q->slots_committed, 4, PRIMARY);
	place("ring_mask", &q->ring_mask, 4, DERIVED);
	place("sessions_committed", &q->sessions_committed, 4, PRIMARY);
	place("dirty", &q->dirty, 4, DERIVED);
	place("paused and positions", HEADER(paused, spilling_count), PRIMARY);
	place("spilling_count", &q->spilling_count, 4, DERIVED);
	place("deferred positions", HEADER(deferred_write, reserved3), PRIMARY);
	place("P side", HEADER(ready_tail, arena_committed), DERIVED);
	place("arena_committed", &q->arena_committed, 8, PRIMARY);
	place("enqueued", HEADER(enqueued, reserved5), DERIVED);
	place("D side", HEADER(ready_head, order), DERIVED);
	place("order", &q->order, 8, PRIMARY);
	place("counters", HEADER(delivered, leases_committed), DERIVED);
	place("lease counters", HEADER(leases_committed, leased), PRIMARY);
	place("leased", &q->leased, 4, DERIVED);
	place("takers", &q->takers, sizeof(q->takers), DERIVED);
	place("space", &q->space, sizeof(q->space), DERIVED);
	place("base", q->base, 8, PRIMARY);
	place("arena", &q->arena, offsetof(shmq_arena_desc, reserved), DERIVED);
	place("ready ring", m->ready, 200, DERIVED);
	place("defer ring", m->defer, 16, DERIVED);
	place("requeue ring", m->requeue, 64, DERIVED);
	place("free ring", m->free, 300, DERIVED);
	place("in-flight times", m->in_flight.when, 48, PRIMARY);
	place("in-flight slots", m->in_flight.slot, 24, DERIVED);
	place("deferred times", m->deferred.when, 64, PRIMARY);
	place("deferred slots", m->deferred.slot, 32, DERIVED);
	place("sessions", m->sessions, 2 * sizeof(*m->sessions), PRIMARY);
	place("slots", m->slots, 12 * sizeof(*m->slots), PRIMARY);
	for (uint32_t i = 0; i < 12; i++) /* the tags of the first blocks */
		place("tag", m->arena + m->slots[i].body - SHMQ_ARENA_HEAD, SHMQ_ARENA_HEAD,
		      SHMQ_STATE_OF(ld(&m->slots[i].word)) == SHMQ_LOANED ? PRIMARY : DERIVED);
	for (uint64_t at = 0; at < m->arena_max - SHMQ_ARENA_UNIT;) { /* and of the free ones */
		const uint64_t *block = (const void *)(m->arena + at);

		if (!(block[0] & 1))
			place("free block", m->arena + at, 32, DERIVED);
		at += block[0] & ~UINT64_C(63);
	}
	place("leases", m->leases, 3 * sizeof(*m->leases), PRIMARY);
	place("holder", m->lease_holders, sizeof(*m->lease_holders), PRIMARY);
	place("latency", m->latency, 8, PRIMARY);
	place("directory's segment", d, sizeof(d->segment), PRIMARY);
	place("limits", &d->limits, sizeof(d->limits), PRIMARY);
	place("directory", &d->clients_at,
	      offsetof(shmq_directory_desc, reserved) - offsetof(shmq_directory_desc, clients_at),
	      PRIMARY);
	place("topic", s->b->topics, offsetof(shmq_topic_desc, publish), PRIMARY);
	place("topic's words", &s->b->topics[0].committed,
	      offsetof(shmq_topic_desc, reserved2) - offsetof(shmq_topic_desc, committed), PRIMARY);
	place("entry", s->b->entries, offsetof(shmq_entry_desc, reserved), PRIMARY);
	place("waiter", s->b->waiters, 8, PRIMARY);
	place("request", s->b->requests, 32, PRIMARY);
}

/* Of what channel c had: all but the one that was finished, each at least once. */
static void nothing_is_lost(const char *what, uint32_t word, uint64_t value)
{
	bool came[SCENE_MESSAGES + 1] = {false}, repaired;
	uint32_t expired, due, got;
	uint64_t messages;
	shmq_message m;

	EQUAL(CALL(shmq_audit(w->supervisor, s->queue[0], soon(), &repaired)), 0);
	EQUAL(CALL(shmq_lease_return(s->b, &s->holder, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 4);
	for (int turn = 0; turn < 3; turn++) {
		EQUAL(CALL(shmq_expire(
					  w->supervisor, s->queue[0],
					  &(shmq_expiry){.now = s->monotonic, .realtime = s->realtime, .limit = 1000},
					  soon(), &expired, &due)),
		      0);
		while (!CALL(shmq_take(s->c, &m, 1, soon(), &got))) {
			int k = scene_number(&m);

			if (k >= 0 && k <= SCENE_MESSAGES)
				came[k] = true;
			(void)CALL(shmq_finish(s->c, &m, 1, NULL, soon()));
		}
	}
	for (int k = 1; k <= SCENE_MESSAGES; k++)
		if (!came[k]) {
			fprintf(stderr, "%s, word %u = %#llx: message %d was lost\n", what, word,
			        (unsigned long long)value, k);
			abort();
		}
}

static const uint32_t garbage[] = {0, 1, 0x00010000, 0x5a5a5a5a, 0x7fffffff, 0xffffffff, 0x13};

/* The case a child is at, for a child that does not come back. */
typedef struct progress {
	uint32_t next, found; /* cases */
	bool ended;
	char doing[100];
} progress;

/* Case i: false if there is none. */
static bool find_case(uint32_t i, struct place *p, uint32_t *word, uint32_t *value)
{
	uint32_t kinds = sizeof(garbage) / sizeof(garbage[0]);

	for (uint32_t k = 0; k < places_count; k++) {
		uint32_t here = places[k].bytes / 4 * kinds;

		if (i < here) {
			*p = places[k];
			*word = i / kinds;
			*value = garbage[i % kinds];
			return true;
		}
		i -= here;
	}
	return false;
}

static void do_case(struct place p, uint32_t word, uint32_t value)
{
	bool directory = p.at >= s->b->base && p.at < s->b->base + s->b->size;
	shmq_loan *begun;
	uint64_t id;

	scene_restore(s);
	EQUAL(shmq_loan_begin(s->p, 1000, soon(), &begun), 0);
	memset(shmq_loan_data(begun), 'l', 1000);
	memcpy(p.at + 4 * word, &value, 4);
	if (CALL(shmq_loan_commit(begun, 0, shortly(), &id)))
		(void)CALL(shmq_loan_cancel(begun, shortly()));
	shmq_loan_free(begun);
	for (size_t i = 0; i < OPERATIONS; i++)
		operations[i]();
	if (!directory)
		the_one_beside_has_all();
	if (p.kind == DERIVED) {
		scene_restore(s);
		memcpy(p.at + 4 * word, &value, 4);
		nothing_is_lost(p.what, word, value);
	}
}

static void child(progress *at, bool mutant)
{
	if (mutant && !freopen("/dev/null", "w", stderr))
		abort();
	alarm(SECONDS);
	s = scene_make();
	w = s->w;
	list_places();
	for (uint32_t n = 0; n < PIECE; n++) {
		uint32_t word, value;
		struct place p;

		at->ended = !find_case(at->next, &p, &word, &value);
		if (at->ended)
			break;
		snprintf(at->doing, sizeof(at->doing), "%s, word %u = %#x", p.what, word, value);
		do_case(p, word, value);
		at->next++;
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	bool mutant = argc > 1 && !strcmp(argv[1], "--mutant");
	progress *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

#ifdef __SANITIZE_THREAD__
	return 77; /* there is one thread */
#endif
	while (!at->ended && (!mutant || at->found < ENOUGH)) {
		int status;
		pid_t pid = fork();

		if (!pid)
			child(at, mutant);
		EQUAL(waitpid(pid, &status, 0), pid);
		if (!status)
			continue;
		if (!mutant)
			fprintf(stderr, "%s: wait status %#x\n", at->doing, status);
		at->found++;
		at->next++;
	}
	fprintf(stderr, "%u cases, %u of them found something\n", at->next, at->found);
	return mutant ? at->found < ENOUGH : at->found != 0;
}

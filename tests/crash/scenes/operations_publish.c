/* Publishing: small and large bodies, deferred messages, loans, sequences of an idempotent producer. */
#include "operations.h"

#include <stdlib.h>

static void publish_one(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

static void publish_three(scene *s)
{
	publish(s, s->mine, s->my_producer, 3, SMALL, 0);
}

static void publish_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, LARGE, 0);
}

static void publish_two_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, LARGE, 0);
}

static void publish_deferred(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, SMALL, in_an_hour());
}

static void publish_five(scene *s)
{
	publish(s, s->mine, s->my_producer, 5, SMALL, 0);
}

static void fill_first_slots(scene *s)
{
	publish(s, s->alive, s->producer, 10, SMALL, 0);
}

static void publish_very_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, 1500, 0);
}

static void fill_first_arena(scene *s)
{
	publish(s, s->alive, s->producer, 8, 1900, 0);
}

static void fill_to_the_brim(scene *s)
{
	publish(s, s->alive, s->producer, 20, SMALL, 0);
}

static void publish_in_vain(scene *s)
{
	EQUAL(try_publish(s, s->mine, s->my_producer, 2, SMALL, 0), SHMQ_FULL);
}

static void come_and_find_it_full(scene *s)
{
	come(s);
	publish_in_vain(s);
}

static void wait_for_room(scene *s)
{
	int r = WATCHED(shmq_producer_wait(s->my_producer, shmq_now()));

	CHECK(r == 0 || r == SHMQ_TIMEOUT);
}

/* A client waits on queue 0 with a doorbell of its own. No thread is there to be woken. */
void wait_on_first(scene *s, shmq_broker *b, uint32_t bell)
{
	shmq_waiter_desc *w = &waiters_of(s)[bell];
	shmq_waitset_desc *takers = &queue_of(s, 0)->takers;
	uint32_t client = shmq_broker_client(b);

	w->owner = (uint64_t)clients_of(s)[client].generation << 32 | (client + 1);
	if (directory_of(s)->waiters_high <= bell)
		directory_of(s)->waiters_high = bell + 1;
	takers->words[bell / 64] |= UINT64_C(1) << bell % 64;
	takers->summary |= UINT64_C(1) << bell / 64;
}

void somebody_waits(scene *s)
{
	wait_on_first(s, s->alive, BELL);
}

static void waiter_was_rung(scene *s)
{
	int rings;

	CHECK(!sem_getvalue(&waiters_of(s)[BELL].bell, &rings));
	if (!rings)
		wrong("a waiter sleeps on (its bit is %sset)",
		      queue_of(s, 0)->takers.words[0] >> BELL & 1 ? "" : "not ");
}

void lend(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_loan_begin(s->my_producer, 200, soon(), &s->loan)), 0);
}

/* From here on messages have properties. */
void with_properties(scene *s)
{
	s->ledger->properties = true;
}

static void lend_with_properties(scene *s)
{
	uint8_t block[PROPERTIES];
	shmq_body properties = {block, PROPERTIES};

	properties_make(s->ledger->next, block);
	EQUAL(CALL(s, s->mine, shmq_loan_begin_on(s->my_producer, 200, &properties, soon(), &s->loan)),
	      0);
}

static void commit_loan(scene *s)
{
	uint32_t number = s->ledger->next++;
	uint8_t *to = shmq_loan_data(s->loan);
	uint64_t id;

	s->ledger->with[number] = s->ledger->properties;
	s->ledger->sealed[number] = s->ledger->seal ? SEALED : UNSEALED;
	set_fates(s, number, 1, GROUP);
	to[0] = (uint8_t)number;
	for (uint32_t i = 1; i < 200; i++)
		to[i] = (uint8_t)(number * 7 + i);
	EQUAL(CALL(s, s->mine, shmq_loan_commit(s->loan, 0, soon(), &id)), 0);
	set_fates(s, number, 1, DUE);
}

static void lend_and_commit(scene *s)
{
	lend(s);
	commit_loan(s);
}

static void lend_and_commit_with_properties(scene *s)
{
	lend_with_properties(s);
	commit_loan(s);
}

static void come_and_lend(scene *s)
{
	come(s);
	lend(s);
}

static void cancel_loan(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_loan_cancel(s->loan, soon())), 0);
}

static void lend_then_a_channel_comes(scene *s)
{
	uint64_t serial;
	uint32_t index;

	come_and_lend(s);
	index = make_queue(s, s->mine, "new", &serial);
	add_queue(s, index, serial, true);
}

/* Publish two messages, always with the same sequence: only the first call publishes them. */
static int publish_two_once(scene *s, shmq_broker *b, shmq_producer *p)
{
	shmq_sequence sequence = {.key = {7, 8}, .epoch = 0, .after = 0, .upto = 2};
	uint32_t first = s->ledger->next;
	uint8_t blocks[2][PROPERTIES];
	shmq_body bodies[2], properties[2];
	shmq_terms terms = {.properties = s->ledger->properties ? properties : NULL};
	uint64_t id;
	int r;

	for (uint32_t i = 0; i < 2; i++) {
		bodies[i] = (shmq_body){body_make(first + i, SMALL), SMALL};
		s->ledger->with[first + i] = s->ledger->properties;
		s->ledger->sealed[first + i] = s->ledger->seal ? SEALED : UNSEALED;
		properties_make(first + i, blocks[i]);
		properties[i] = (shmq_body){blocks[i], PROPERTIES};
	}
	set_fates(s, first, 2, GROUP);
	s->ledger->next += 2;
	s->ledger->once = s->ledger->once ? s->ledger->once : first;
	r = CALL(s, b, shmq_publish_once(p, bodies, 2, &terms, &sequence, soon(), &id));
	set_fates(s, first, 2, r ? NEVER : DUE);
	for (uint32_t i = 0; i < 2; i++)
		free((void *)(uintptr_t)bodies[i].data);
	return r;
}

static void publish_once(scene *s)
{
	EQUAL(publish_two_once(s, s->mine, s->my_producer), 0);
}

/* Publish again, as after a death. If that succeeds, the first messages are not there. */
static void publish_once_again(scene *s)
{
	uint32_t first = s->ledger->once;
	int r = publish_two_once(s, s->alive, s->producer);

	CHECK(r == 0 || r == SHMQ_REPEATED);
	set_fates(s, first, 2, r ? DUE : NEVER);
	EQUAL(publish_two_once(s, s->alive, s->producer), SHMQ_REPEATED);
}

static void read_sequence(scene *s)
{
	uint64_t key[2] = {7, 8};
	shmq_sequence sequence;

	EQUAL(CALL(s, s->mine, shmq_sequence_read(s->my_producer, key, soon(), &sequence)), 0);
	CHECK(sequence.epoch == 1 && sequence.upto == 2);
}

/* The state that a death right after the commit word leaves. */
static void come_and_publish_once_halfway(scene *s)
{
	shmq_writer_desc *w = (void *)(s->files->map[0] + directory_of(s)->writers_at);

	come(s);
	publish_once(s);
	w->epoch = w->rows = 0;
	w->next_seq = topics_of(s)[s->topic].committed;
}

static void publish_once_after_a_death(scene *s)
{
	EQUAL(publish_two_once(s, s->mine, s->my_producer), SHMQ_REPEATED);
}

static void somebody_died_publishing_once(scene *s)
{
	a_death(s, come_and_publish_once_halfway, 1);
}

/* ---- marks that give way ---- */

static shmq_writer_desc *writers_of(const scene *s)
{
	return (void *)(s->files->map[0] + directory_of(s)->writers_at);
}

static uint32_t other_topic(const scene *s)
{
	return s->topic + 1;
}

/* All entries belong to another topic, and the last ones to a client on the network: the very last is
 * the oldest. They are few, because a publisher counts each client's. */
static uint64_t whose(uint32_t writer)
{
	return writer >= SHMQ_WRITERS - 4;
}

static void others_mark(scene *s)
{
	uint32_t topic, generation;

	EQUAL(shmq_topic_create(s->home, "other", 0, NULL, soon(), &topic, &generation), 0);
	EQUAL(topic, other_topic(s));
	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		shmq_writer_desc *w = &writers_of(s)[i];

		w->key[0] = i + 1;
		w->whose = whose(i);
		w->used = SHMQ_WRITERS - i;
		w->epoch = w->rows = 1;
		w->topic = (uint64_t)(topic + 1) | (uint64_t)generation << 32;
	}
}

/* At most one entry went, and the mark of none has changed. */
static uint32_t others_marks(const scene *s)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		const shmq_writer_desc *w = &writers_of(s)[i];

		if ((uint32_t)w->topic != other_topic(s) + 1)
			continue;
		n++;
		if (w->key[0] != i + 1 || w->whose != whose(i) || w->epoch != 1 || w->rows != 1)
			wrong("the mark of writer %u has changed", i);
	}
	return n;
}

static void one_gave_way(scene *s)
{
	CHECK(others_marks(s) >= SHMQ_WRITERS - 1);
	publish_once_again(s);
	EQUAL(others_marks(s), SHMQ_WRITERS - 1);
}

static void come_while_the_other_publishes(scene *s)
{
	come(s);
	pthread_mutex_lock(&topics_of(s)[other_topic(s)].publish.mutex);
}

static void publish_once_later(scene *s)
{
	EQUAL(publish_two_once(s, s->mine, s->my_producer), SHMQ_AGAIN);
}

static void none_gave_way(scene *s)
{
	EQUAL(others_marks(s), SHMQ_WRITERS);
	one_gave_way(s);
}

static void die_with_the_other(scene *s)
{
	s->mine = attach(s, SHMQ_AS_CLIENT);
}

/* A publisher of the other topic died halfway: the mark that gives way is not settled. */
static void others_mark_and_one_died(scene *s)
{
	uint32_t topic = s->topic;

	others_mark(s);
	writers_of(s)[SHMQ_WRITERS - 1].next_seq = UINT64_MAX;
	s->topic = other_topic(s);
	a_death(s, die_with_the_other, 1);
	s->topic = topic;
}

/* ---- seals ---- */

/* From here on sealed producers publish. */
void with_seals(scene *s)
{
	s->ledger->seal = true;
	s->producer = produce(s, s->alive);
}

static void with_seals_and_properties(scene *s)
{
	with_seals(s);
	with_properties(s);
}

/* Sealed messages came and went; now nobody seals any. */
static void sealed_ones_went(scene *s)
{
	with_seals(s);
	publish(s, s->alive, s->producer, 4, SMALL, 0);
	take_alive(s, 8);
	finish(s, 0, s->consumer, s->m, 8);
	EQUAL(shmq_consumer_close(s->consumer, soon()), 0);
	shmq_consumer_free(s->consumer);
	s->ledger->seal = false;
	s->producer = produce(s, s->alive);
}

static void the_topic_is_sealed(scene *s)
{
	static const shmq_settings sealed = {.flags = SHMQ_SEALED_ONLY};

	EQUAL(CALL(s, s->alive,
	           shmq_topic_configure(s->alive, s->topic, s->generation, NULL, &sealed, soon())),
	      0);
	with_seals(s);
}

static void come_without_a_seal(scene *s)
{
	s->mine = attach(s, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(s->mine, s->topic, s->generation, &s->my_producer), 0);
}

/* No channel ever has it, wherever the publisher dies. */
static void be_refused(scene *s, uint32_t length)
{
	uint32_t number = s->ledger->next++;
	shmq_body body = {body_make(number, length), length};
	uint64_t id;

	set_fates(s, number, 1, NEVER);
	EQUAL(CALL(s, s->mine, shmq_publish(s->my_producer, &body, 1, 0, soon(), &id)),
	      SHMQ_NOT_SEALED);
	free((void *)(uintptr_t)body.data);
}

static void be_refused_one(scene *s)
{
	be_refused(s, SMALL);
}

static void be_refused_large(scene *s)
{
	be_refused(s, LARGE);
}

static void somebody_died_with_both_locks(scene *s)
{
	a_death(s, come_and_take, 3);
}

static const operation table[] = {
	{"publish to a channel", 1, NULL, come, publish_one, NULL, 0, 0, 0},
	{"publish to three channels", 3, NULL, come, publish_one, NULL, 0, 0, 0},
	{"publish a batch to three channels", 3, NULL, come, publish_three, NULL, 0, 0, 0},
	{"publish a large body", 3, NULL, come, publish_large, NULL, 0, 0, 0},
	{"publish two large bodies", 2, NULL, come, publish_two_large, NULL, 0, 0, 0},
	{"publish deferred", 3, NULL, come, publish_deferred, NULL, 0, 0, 0},
	{"publish into a backlog", 0, NULL, come, publish_three, NULL, 0, 0, 0},
	{"publish while the slots grow", 2, fill_first_slots, come, publish_five, NULL, 0, 0, 0},
	{"publish while the arena grows", 2, fill_first_arena, come, publish_very_large, NULL, 0, 0, 0},
	{"publish in vain", 1, fill_to_the_brim, come, publish_in_vain, NULL, 0, 0, 0},
	{"publish to a waiter", 1, somebody_waits, come, publish_one, waiter_was_rung, 0, 0, 0},
	{"lend and commit", 3, NULL, come, lend_and_commit, NULL, 0, 0, 0},
	{"commit a loan to a new channel", 2, NULL, lend_then_a_channel_comes, commit_loan, NULL, 0, 0,
	 0},
	{"cancel a loan", 3, NULL, come_and_lend, cancel_loan, NULL, 0, 0, 0},
	{"publish with properties", 2, with_properties, come, publish_three, NULL, 0, 0, 0},
	{"publish large bodies with properties", 2, with_properties, come, publish_two_large, NULL, 0,
	 0, 0},
	{"lend and commit with properties", 2, with_properties, come, lend_and_commit_with_properties,
	 NULL, 0, 0, 0},
	{"wait for room", 1, fill_to_the_brim, come_and_find_it_full, wait_for_room, NULL, 0, 0, 0},
	{"publish after a death", 2, somebody_died_with_both_locks, come, publish_three, NULL, 0, 0, 0},
	{"publish once", 3, NULL, come, publish_once, publish_once_again, 0, 0, 0},
	{"publish once with properties", 2, with_properties, come, publish_once, publish_once_again, 0,
	 0, 0},
	{"read a sequence after a death", 2, somebody_died_publishing_once, come, read_sequence,
	 publish_once_again, 0, 0, 0},
	{"publish once after a death", 2, somebody_died_publishing_once, come,
	 publish_once_after_a_death, publish_once_again, 0, 0, 0},
	{"publish once where another's mark gives way", 2, others_mark, come, publish_once,
	 one_gave_way, 0, 0, 0},
	{"publish once while another topic is locked", 1, others_mark, come_while_the_other_publishes,
	 publish_once_later, none_gave_way, 0, 0, 0},
	{"publish once where a dead one's mark gives way", 1, others_mark_and_one_died, come,
	 publish_once, one_gave_way, 0, 0, 0},
	{"publish sealed", 2, with_seals, come, publish_one, NULL, 0, 0, 0},
	{"publish a sealed batch", 2, with_seals, come, publish_three, NULL, 0, 0, 0},
	{"publish sealed with properties", 2, with_seals_and_properties, come, publish_three, NULL, 0,
	 0, 0},
	{"publish two large sealed bodies", 2, with_seals, come, publish_two_large, NULL, 0, 0, 0},
	{"publish sealed into a backlog", 0, with_seals, come, publish_three, NULL, 0, 0, 0},
	{"publish once sealed", 2, with_seals, come, publish_once, publish_once_again, 0, 0, 0},
	{"lend and commit sealed", 2, with_seals, come, lend_and_commit, NULL, 0, 0, 0},
	{"publish where sealed ones were", 1, sealed_ones_went, come, publish_three, NULL, 0, 0, 0},
	{"be refused at a sealed topic", 1, the_topic_is_sealed, come_without_a_seal, be_refused_one,
	 NULL, 0, 0, 0},
	{"be refused at a sealed topic with a large body", 1, the_topic_is_sealed, come_without_a_seal,
	 be_refused_large, NULL, 0, 0, 0},
	{"publish to a sealed topic", 1, the_topic_is_sealed, come, publish_three, NULL, 0, 0, 0},
};

const operations publish_operations = {table, sizeof(table) / sizeof(table[0])};

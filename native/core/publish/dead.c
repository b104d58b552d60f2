/*
 * Moving messages between topics, one in one transaction: a convicted message to its dead topic, and
 * a dead letter back to the channel it came from.
 *
 * Held: the publish lock (P) of the topic that gets the message, and the deliver lock (D) of the
 * queue that loses it; P first. Under them, in this order:
 *
 *   1 topic.moving = the losing queue, at the topic that gets the message
 *   2 MOVING(seq) in the losing queue, with that topic in the owner's bits
 *   3 PREPARED(seq), the commit word, READY in the topic (fanout.h)
 *   4 the heap, FREE in the losing queue
 *
 * and, when the last message is moved, topic.moving = 0. Room is made before D is taken, because
 * making room may take another D.
 *
 * death: the commit word of the topic that gets the message decides both slots. A rebuild of the
 * losing queue reads it; the next locker of P decides that queue's MOVING slots (locking.c) before
 * it gives the sequence number again.
 */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/properties.h"
#include "memory/segment.h"
#include "publish/fanout.h"
#include "publish/producer.h"
#include "queue/failure.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"
#include "sync/doorbell.h"

#include <stdio.h>
#include <string.h>

/* ---- the name of a dead topic ---- */

/* Copy a name without "#ephemeral" at its end. */
static void name_plain(char *to, const char *name)
{
	size_t length = strnlen(name, SHMQ_NAME - 1);

	if (shmq_name_ephemeral(name, length))
		length -= strlen("#ephemeral");
	memcpy(to, name, length);
	to[length] = 0;
}

int shmq_dead_topic(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until, char *name)
{
	const shmq_entry_desc *e = &b->entries[queue];
	char chosen[SHMQ_NAME], topic[SHMQ_NAME], channel[SHMQ_NAME], whole[3 * SHMQ_NAME];
	shmq_settings settings;
	int r = shmq_queue_settings(b, queue, serial, until, &settings);

	if (r)
		return r;
	memcpy(chosen, settings.dead_letter, sizeof(chosen));
	chosen[SHMQ_NAME - 1] = 0;
	name_plain(topic, b->topics[e->topic % SHMQ_TOPICS].name);
	name_plain(channel, e->name);
	snprintf(whole, sizeof(whole), "%s.%s.dead", topic, channel);
	if (*chosen)
		strcpy(whole, chosen);
	if (ld(&e->role) != SHMQ_ROLE_CHANNEL)
		return fail(SHMQ_INVALID, "a topic's backlog has no dead letters");
	if (strlen(whole) >= SHMQ_NAME || !name_ok(whole))
		return fail(SHMQ_BAD_NAME,
		            "the dead topic of this channel would be '%s', which is no valid name: choose "
		            "one with the setting dead_letter",
		            whole);
	strcpy(name, whole);
	return 0;
}

/* ---- one move ---- */

typedef struct carry {
	fanout f; /* one message each */
	shmq_producer *p;
	shmq_map *from;
	unsigned state; /* of the slots that are moved: DEFERRED or IN_FLIGHT */
	uint32_t slot;  /* the one that is moved next, and its state word */
	uint64_t word;
	/* The properties that it gets there: its own and, for a dead letter, why it is one. */
	uint8_t block[SHMQ_PROPERTIES_MOST];
	uint32_t block_bytes, body_bytes;
	uint64_t length; /* of them and of the body */
	const char *error;
	uint32_t error_length;
	uint64_t skip[SKIP_WORDS];
	uint32_t moved;
	uint64_t bytes;
} carry;

/* A status of these functions: the losing queue has to be repaired first, which takes P of its own
 * topic. */
#define SOURCE_BROKEN 1

/* Take D of the losing queue, while P of another topic is held. */
static int source_lock(shmq_map *from, int64_t until)
{
	bool clean;
	int r = queue_lock_beside(from, until, &clean);

	if (!r && !clean) {
		queue_unlock(from);
		r = SOURCE_BROKEN;
	}
	return r;
}

static bool is_dead_property(const shmq_property *p)
{
	return p->name_length >= 5 && !memcmp(p->name, "dead-", 5);
}

/* Add a property that says something about a death, if there is room for it: also on disk, where the
 * longest message is no longer than max_msg_size. */
static void note_add(carry *c, const char *name, const void *value, size_t length)
{
	uint64_t bytes = c->block_bytes;
	shmq_property p = {name, value, (uint32_t)strlen(name), (uint32_t)length};

	if (length &&
	    SHMQ_ENVELOPE + bytes + PROPERTY_HEAD + p.name_length + length + c->body_bytes <=
	            c->p->b->d->limits.max_msg_size &&
	    !shmq_property_add(c->block, &bytes, &p))
		c->block_bytes = (uint32_t)bytes;
}

static void note_number(carry *c, const char *name, uint64_t number)
{
	char text[24];

	if (number)
		note_add(c, name, text,
		         (size_t)snprintf(text, sizeof(text), "%llu", (unsigned long long)number));
}

/* Say why, from where, when and by which process the message died. */
static void notes_add(carry *c, const shmq_slot_desc *s)
{
	static const char *const reasons[] = {"attempts", "rejected", "expired", "overflow"};
	const char *reason = reasons[s->flags >> SHMQ_SLOT_REASON_SHIFT & 3];
	const shmq_broker *b = c->p->b;
	char from[2 * SHMQ_NAME];

	snprintf(from, sizeof(from), "%.*s/%.*s", SHMQ_NAME - 1, b->topics[c->from->topic].name,
	         SHMQ_NAME - 1, b->entries[c->from->index].name);
	note_add(c, "dead-reason", reason, strlen(reason));
	note_add(c, "dead-from", from, strlen(from));
	note_number(c, "dead-failures", failures_of(s));
	note_number(c, "dead-when", s->previous == SHMQ_IN_FLIGHT ? s->after : (uint64_t)realtime_ns());
	note_number(c, "dead-pid", s->previous == SHMQ_IN_FLIGHT ? s->turn : 0);
	note_add(c, "dead-error", c->error, c->error_length);
}

/* Note which slot is next, and its properties there. D is held. */
static int carry_next(carry *c, uint32_t slot)
{
	shmq_slot_desc *s = &c->from->slots[slot];
	shmq_property p;
	uint64_t next = 0;
	const uint8_t *block;
	span at;

	if (!slot_is(c->from, slot, c->state) || !body_in(c->from, s, &at)) {
		queue_broken(c->from);
		return SOURCE_BROKEN;
	}
	c->slot = slot;
	c->word = ld(&s->word);
	c->block_bytes = 0;
	c->body_bytes = at.length;
	block = c->from->arena + at.body - at.properties;
	while (shmq_property_next(block, at.properties, &next, &p) > 0)
		if (!is_dead_property(&p) &&
		    c->block_bytes + PROPERTY_HEAD + p.name_length + p.length <= SHMQ_PROPERTIES_MOST)
			c->block_bytes = (uint32_t)(property_write(c->block + c->block_bytes, &p) - c->block);
	if (c->state == SHMQ_DEFERRED)
		notes_add(c, s);
	c->length = (uint64_t)c->block_bytes + at.length;
	return 0;
}

static void carry_release(carry *c)
{
	shmq_map *from = c->from;
	shmq_slot_desc *s = &from->slots[c->slot];

	if (c->state == SHMQ_IN_FLIGHT) {
		shmq_session_desc *its = session_of(from, s);

		heap_remove(&from->in_flight, c->slot);
		if (its)
			session_leave(its);
		s->previous = SHMQ_FREE; /* it says nothing of the slot's next message */
		bump(&from->q->finished, 1);
	} else {
		heap_remove(&from->deferred, c->slot);
		bump(&from->q->dead_lettered, 1);
	}
	in_use_remove(from, c->slot);
	SHMQ_KILLPOINT("carry.popped");
	slot_release(from, c->slot);
}

/* Move the slot in one transaction; its state word was compared. P and D are held, and there is
 * room. */
static int carry_one(carry *c)
{
	shmq_topic_desc *t = c->p->t;
	shmq_slot_desc *s = &c->from->slots[c->slot];
	shmq_body body, block = {c->block, c->block_bytes};
	extras more = {.blocks = &c->block_bytes, .properties = &block};
	span at;
	int r;

	if (!body_in(c->from, s, &at) || c->block_bytes + (uint64_t)at.length != c->length) {
		queue_broken(c->from);
		return SOURCE_BROKEN;
	}
	body = (shmq_body){c->from->arena + at.body, at.length};
	c->f.bodies = &body;
	more.sealed = at.sealed;
	c->f.extras = c->block_bytes || at.sealed ? &more : NULL;
	c->f.seq = ld(&t->committed) + 1;
	c->f.first_id = s->id;
	/* A message that is sent back begins a new life: no expiry of its own, as `flags` is 0, and
	 * message_ttl counts from now. Its id still says when it was published. */
	c->f.timestamp = c->state == SHMQ_IN_FLIGHT ? realtime_ns() : s->timestamp;
	c->f.attempts = s->attempts;
	c->f.bytes = at.length;
	s->previous = (uint8_t)c->state;
	s->move = c->f.seq;
	if (c->state == SHMQ_IN_FLIGHT) { /* if it comes back it is REQUEUED with its old order */
		s->after = 0;
		s->pos = SHMQ_NO_POSITION;
	}
	st(&t->moving, c->from->index + 1);
	SHMQ_KILLPOINT("carry.fields");
	/* SYNC(slot-state) */
	st_release(&s->word, SHMQ_WORD(SHMQ_MOVING, c->p->topic + 1, SHMQ_GENERATION_OF(ld(&s->word))));
	SHMQ_KILLPOINT("carry.moving");
	r = fanout_prepare(&c->f);
	if (r)
		return r; /* the next locker of P gives the slot its previous state */
	fanout_commit(&c->f);
	SHMQ_KILLPOINT("carry.committed");
	fanout_flip(&c->f);
	carry_release(c);
	c->moved++;
	c->bytes += at.length;
	return 0;
}

/* Make room, take D, and move the slot that was noted. P is held. SHMQ_GONE: somebody else has
 * changed it since. */
static int carry_noted(carry *c, int64_t until)
{
	int r;

	c->f.lengths = &c->length;
	r = fanout_room(&c->f, until);
	for (uint32_t k = 0; !r && k < c->f.count; k++)
		if (fanout_skips(&c->f, k))
			r = SHMQ_FULL; /* an ephemeral channel is full: nothing is dropped here */
	if (!r)
		r = source_lock(c->from, until);
	if (r)
		return r;
	r = ld(&c->from->slots[c->slot].word) == c->word ? carry_one(c) : SHMQ_GONE;
	queue_unlock(c->from);
	return r;
}

/* Begin: take P, and the list of its queues. */
static int carry_lock(carry *c, int64_t until)
{
	shmq_map **targets;
	uint32_t count;
	int r = producer_lock(c->p, until, &targets, &count);

	if (!r) {
		c->f = (fanout){.p = c->p, .n = 1, .skip = c->skip};
		fanout_target(&c->f, targets, count);
	}
	return r;
}

/* Unlock P, and wake those who wait at either end. */
static void carry_unlock(carry *c)
{
	shmq_topic_desc *t = c->p->t;

	/* After an aborted move the next locker of P needs the note. */
	if (!ld(&t->dirty))
		st(&t->moving, 0);
	if (!c->moved) {
		topic_unlock(t);
		return;
	}
	c->f.n = c->moved;
	c->f.bytes = c->bytes;
	fanout_end(&c->f);
	c->moved = 0;
	c->bytes = 0;
	wake_space(c->p->b, c->from);
	wake_takers(c->p->b, c->from, WAKE_ALL);
}

/* After SOURCE_BROKEN, with nothing locked: have the queue repaired, once. */
static int source_repair(carry *c, bool *repaired, int64_t until)
{
	int r = *repaired ? queue_corrupt(c->from) : queue_lock(c->p->b, c->from, until);

	if (!r)
		queue_unlock(c->from);
	*repaired = true;
	return r;
}

/* ---- to the dead topic ---- */

/* Correct the queue's next due time, as shmq_expire does. D is held. */
static void due_correct(shmq_broker *b, shmq_map *map)
{
	st(&b->next_due[map->index], heap_first(&map->deferred));
	fence_full(); /* SYNC(due-time) */
	defer_drain(b, map);
}

/* Find the next convicted message whose time has come, or the message `m`. */
static int convicted_next(carry *c, const shmq_message *m, int64_t until)
{
	shmq_map *from = c->from;
	int r = source_lock(from, until);
	uint32_t slot = SHMQ_NONE;

	if (r)
		return r;
	if (m)
		slot = m->slot;
	else if (ld(&from->q->deferred_len) && heap_first(&from->deferred) <= realtime_ns())
		slot = once(from->deferred.slot[0]);
	if (slot >= slots_of(from) ||
	    (m && ld(&from->slots[slot].word) != word_next(m->word, SHMQ_DEFERRED)) ||
	    !(from->slots[slot].flags & SHMQ_SLOT_CONVICTED))
		r = SHMQ_EMPTY;
	else
		r = carry_next(c, slot);
	if (r == SHMQ_EMPTY)
		due_correct(c->p->b, from);
	queue_unlock(from);
	return r;
}

/* Close the topic to everybody but pools and queues before it gets the first dead letter of one,
 * whoever has named it for them. P is held. The topic keeps its channels: it has dead letters. It
 * stays closed, because letters may be there after the setting has gone. Death: before the store the
 * letter is where it was; after it somebody else moves it. */
static void topic_close(carry *c)
{
	shmq_topic_desc *t = c->p->t;
	shmq_broker *b = c->p->b;
	shmq_settings now;

	if (!has_policy(c->from, SHMQ_POLICY_SEALED) || ld(&t->policy) & SHMQ_POLICY_SEALED)
		return;
	now = topic_settings_load(t);
	now.flags |= SHMQ_SEALED_ONLY;
	topic_settings_store(t, &now);
	atomic_fetch_add(&t->version, 1);
	atomic_fetch_add(&b->d->generation, 1); /* so that nsqd.dat has it */
	supervisor_ring(b, SHMQ_RING_CHANGED);
}

/* Move as many as possible under one hold of P. */
static int convicted_move(carry *c, const shmq_message *m, uint32_t n, uint32_t *at, int64_t until,
                          uint32_t *moved)
{
	int r = carry_lock(c, until);

	if (r)
		return r;
	c->p->t->flags |= SHMQ_FLAG_DEAD;
	topic_close(c);
	while (*at < n) {
		r = convicted_next(c, m ? &m[*at] : NULL, until);
		if (!r)
			r = carry_noted(c, until);
		*moved += !r;
		if (m && (r == SHMQ_EMPTY || r == SHMQ_GONE))
			r = 0; /* somebody else has moved it */
		if (r == SHMQ_GONE && ld(&c->from->q->segment.ready) == SHMQ_READY_STATE)
			continue; /* another was convicted meanwhile */
		if (r)
			break;
		++*at;
	}
	carry_unlock(c);
	return r;
}

#define MOST_ERROR 1024u /* bytes of an error text that are kept */

static int carry_begin(shmq_broker *b, carry *c, uint32_t topic, uint32_t generation,
                       unsigned state, shmq_map *from)
{
	*c = (carry){.from = from, .state = state};
	if (topic == from->topic)
		return fail(SHMQ_INVALID, "a channel's dead letters go to another topic than its own");
	return shmq_producer_open(b, topic, generation, &c->p);
}

int shmq_dead_move(shmq_broker *b, uint32_t queue, uint64_t serial, const shmq_dead_target *to,
                   const shmq_dead_wish *wish, int64_t until, uint32_t *moved)
{
	bool repaired = false;
	uint32_t at = 0;
	shmq_map *from;
	carry c;
	int r = usable_status(b);

	error_clear();
	*moved = 0;
	if (!r)
		r = map_get_serial(b, queue, serial, &from);
	if (r)
		return r;
	client_note_queue(b, queue);
	r = carry_begin(b, &c, to->topic, to->generation, SHMQ_DEFERRED, from);
	c.error = to->error;
	c.error_length = to->error_length < MOST_ERROR ? to->error_length : MOST_ERROR;
	if (r) {
		map_release(from);
		return r;
	}
	do {
		r = convicted_move(&c, wish->messages, wish->n, &at, until, moved);
	} while (r == SOURCE_BROKEN && !(r = source_repair(&c, &repaired, until)));
	shmq_producer_close(c.p);
	map_release(from);
	return *moved && r != SHMQ_NEED_MAP ? 0 : r;
}

bool shmq_dead_waiting(shmq_broker *b, uint32_t queue)
{
	return queue < queues_of(b) && ld(&b->next_due[queue]) == SHMQ_DUE_CONVICTED;
}

int shmq_dead_postpone(shmq_broker *b, uint32_t queue, int64_t due, uint32_t n, int64_t until,
                       uint32_t *count)
{
	shmq_map *map;
	int r = queue_enter(b, queue, until, &map);

	*count = 0;
	if (r)
		return r;
	while (*count < n && heap_first(&map->deferred) == SHMQ_DUE_CONVICTED) {
		uint32_t slot = once(map->deferred.slot[0]);

		if (!slot_is(map, slot, SHMQ_DEFERRED)) {
			queue_broken(map);
			break;
		}
		if (!(map->slots[slot].flags & SHMQ_SLOT_CONVICTED))
			break;
		map->slots[slot].deadline = due;
		SHMQ_KILLPOINT("postpone.due");
		heap_change(&map->deferred, slot, due);
		++*count;
	}
	due_correct(b, map);
	queue_unlock(map);
	map_release(map);
	return 0;
}

/* ---- back again ---- */

static int is_paused(void)
{
	return fail(SHMQ_INVALID, "the topic is paused: unpause it first");
}

/* Find the target: the queue of this index, alone. P is held. */
static int target_find(carry *c, uint32_t queue, uint64_t serial, shmq_map **target)
{
	shmq_producer *p = c->p;

	if (ld(&p->t->paused))
		return is_paused();
	for (uint32_t k = 0; k < p->channels; k++)
		if (p->maps[k]->index == queue && p->maps[k]->serial == serial) {
			*target = p->maps[k];
			fanout_target(&c->f, target, 1);
			return 0;
		}
	return SHMQ_GONE;
}

/* Move as many as possible under one hold of P. */
static int redrive_some(carry *c, const shmq_message *m, uint32_t n, uint32_t queue,
                        uint64_t serial, uint32_t *at, uint8_t *ok, int64_t until)
{
	shmq_map *target;
	int r = carry_lock(c, until);

	if (r == SHMQ_NEED_BACKLOG) /* no channel receives */
		r = ld(&c->p->t->paused) ? is_paused() : SHMQ_GONE;
	if (r)
		return r;
	r = target_find(c, queue, serial, &target);
	for (; !r && *at < n; ++*at) {
		r = source_lock(c->from, until);
		if (r)
			break;
		ok[*at] = m[*at].slot < slots_of(c->from) &&
		          ld(&c->from->slots[m[*at].slot].word) == m[*at].word;
		r = ok[*at] ? carry_next(c, m[*at].slot) : 0;
		queue_unlock(c->from);
		if (!r && ok[*at]) {
			r = carry_noted(c, until);
			ok[*at] = !r;
		}
		if (r == SHMQ_GONE && ld(&c->from->q->segment.ready) == SHMQ_READY_STATE)
			r = 0; /* it timed out just now */
		if (r)
			break;
	}
	carry_unlock(c);
	return r;
}

int shmq_redrive(shmq_consumer *c, const shmq_message *m, uint32_t n, uint32_t queue,
                 uint64_t serial, uint8_t *ok, int64_t until)
{
	shmq_broker *b = c->b;
	bool repaired = false;
	uint32_t at = 0, done = 0;
	shmq_map *to = NULL;
	carry moves;
	int r = usable_status(b);

	error_clear();
	memset(ok, 0, n);
	if (!r && ld(&c->closed))
		r = SHMQ_CLOSED;
	if (!r)
		r = map_get_serial(b, queue, serial, &to);
	if (r)
		return r;
	r = carry_begin(b, &moves, to->topic, ld(&topic_of(b, to)->generation), SHMQ_IN_FLIGHT, c->map);
	map_release(to);
	if (r)
		return r;
	do {
		r = redrive_some(&moves, m, n, queue, serial, &at, ok, until);
	} while (r == SOURCE_BROKEN && !(r = source_repair(&moves, &repaired, until)));
	shmq_producer_close(moves.p);
	for (uint32_t i = 0; i < n; i++)
		done += ok[i];
	return r ? r : done == n ? 0 : SHMQ_NOT_IN_FLIGHT;
}

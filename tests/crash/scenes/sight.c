#include "sight.h"

#include "../../native/checker.h"

#include <errno.h>

/* The messages that one look finds in one queue. */
typedef struct finding {
	uint8_t seen[MESSAGES];
	uint64_t id[MESSAGES];
	/* in the order in which they will be delivered, but those that wait for a time */
	uint32_t count, number[MESSAGES];
} finding;

void see_structure(const scene *s, const char *when)
{
	const shmq_entry_desc *entries = entries_of(s);

	for (uint32_t i = 0; i < directory_of(s)->queues_committed; i++) {
		const shmq_queue_desc *q;
		const char *says;

		if (entries[i].state != SHMQ_ENTRY_LIVE)
			continue;
		if (!entries[i].serial || entries[i].serial >= FILES - 1)
			wrong("%s: entry %u has the serial number %llu", when, i,
			      (unsigned long long)entries[i].serial);
		q = (const void *)s->files->map[entries[i].serial];
		if (q->segment.ready != SHMQ_READY_STATE || q->segment.serial != entries[i].serial ||
		    q->index != i || q->topic != entries[i].topic)
			wrong("%s: entry %u is live and its segment is not its own, or not ready", when, i);
		says = checker_queue(s->files->map[0], q);
		if (*says)
			wrong("%s: queue %u: %s", when, i, says);
	}
}

static void found(const scene *s, finding *f, const char *when, uint32_t q, const uint8_t *body,
                  uint64_t length, uint64_t id, bool in_turn)
{
	uint32_t number = body_number(body, length);

	if (number == MESSAGES)
		wrong("%s: queue %u: a body is torn (id %016llx, %llu bytes)", when, q,
		      (unsigned long long)id, (unsigned long long)length);
	if (number >= s->ledger->next)
		wrong("%s: queue %u: message %u was never published", when, q, number);
	if (f->seen[number]++)
		wrong("%s: queue %u: message %u is there twice", when, q, number);
	f->id[number] = id;
	if (in_turn)
		f->number[f->count++] = number;
}

/* The same for a message behind whose properties its body lies. */
static void found_with(const scene *s, finding *f, const char *when, uint32_t q,
                       const uint8_t *block, uint64_t properties, uint64_t length, uint64_t id,
                       bool in_turn)
{
	uint32_t number = body_number(block + properties, length - properties);

	found(s, f, when, q, block + properties, length - properties, id, in_turn);
	if (!properties_are(s, number, block, properties))
		wrong("%s: queue %u: message %u has lost its properties", when, q, number);
}

static uint32_t properties_of(const shmq_slot_desc *slot)
{
	return slot->flags & SHMQ_SLOT_PROPERTIES ? slot->properties & ~SHMQ_SLOT_SEALED : 0;
}

static bool is_sealed(const shmq_slot_desc *slot)
{
	return slot->flags & SHMQ_SLOT_PROPERTIES && slot->properties & SHMQ_SLOT_SEALED;
}

/* Of a slot whose body is whole. */
static uint32_t number_of(const scene *s, uint32_t q, const shmq_slot_desc *slot)
{
	return ((const uint8_t *)queue_of(s, q) + queue_of(s, q)->arena_at +
	        slot->body)[properties_of(slot)];
}

static void found_slot(const scene *s, finding *f, const char *when, uint32_t q,
                       const shmq_slot_desc *slot, bool in_turn)
{
	const uint8_t *base = (const void *)queue_of(s, q);
	uint32_t properties = properties_of(slot);

	if (properties > slot->length)
		wrong("%s: queue %u: a slot has %u bytes and %u of properties", when, q, slot->length,
		      properties);
	found_with(s, f, when, q, base + queue_of(s, q)->arena_at + slot->body, properties,
	           slot->length, slot->id, in_turn);
	if (is_sealed(slot) != (s->ledger->sealed[number_of(s, q, slot)] == SEALED))
		wrong("%s: queue %u: message %u is %ssealed", when, q, number_of(s, q, slot),
		      is_sealed(slot) ? "" : "not ");
}

/* A message of the queue, and not what is left of one. */
static bool is_there(const scene *s, uint32_t q, const shmq_slot_desc *slot, unsigned state)
{
	const shmq_lease_desc *leases = (const void *)((const uint8_t *)queue_of(s, q) +
	                                               queue_of(s, q)->leases_at);

	if (state == SHMQ_LEASED)
		return queue_of(s, q)->leases_committed &&
		       leases[slot->move % SHMQ_LEASES].word == (slot->move << 8 | SHMQ_LEASE_HELD);
	if (state != SHMQ_SPILLING)
		return true;
	return slot->previous == SHMQ_DEFERRED ? slot->pos > queue_of(s, q)->deferred_write
	                                       : slot->pos >= queue_of(s, q)->disk_write;
}

/* Slots of one state, by `order`. */
static void see_state(const scene *s, finding *f, const char *when, uint32_t q, unsigned state,
                      bool in_turn)
{
	const shmq_slot_desc *slots = (const void *)((const uint8_t *)queue_of(s, q) +
	                                             queue_of(s, q)->slots_at),
						 *next;
	uint64_t last = 0;

	for (bool first = true;; first = false) {
		next = NULL;
		for (uint32_t i = 0; i < queue_of(s, q)->slots_committed; i++) {
			const shmq_slot_desc *slot = &slots[i];

			if ((slot->word & 0xff) != state || !is_there(s, q, slot, state))
				continue;
			if (!in_turn) { /* `order` means nothing: all at once */
				if (!first)
					continue;
				found_slot(s, f, when, q, slot, false);
			} else if ((first || slot->order > last) && (!next || slot->order < next->order)) {
				next = slot;
			}
		}
		if (!next)
			return;
		last = next->order;
		found_slot(s, f, when, q, next, true);
	}
}

static uint64_t big_endian(const uint8_t *at, int bytes)
{
	uint64_t value = 0;

	while (bytes--)
		value = value << 8 | *at++;
	return value;
}

/* Behind the properties of a sealed message: name, length and tag. The tag is judged where it is read. */
#define SEAL_ENTRY 28u

static void found_record(const scene *s, finding *f, const char *when, uint32_t q,
                         const uint8_t *block, uint64_t properties, uint64_t seal, uint64_t length,
                         uint64_t id, bool in_turn)
{
	uint64_t own = properties - seal;
	uint32_t number = body_number(block + properties, length - properties);

	found(s, f, when, q, block + properties, length - properties, id, in_turn);
	if (!properties_are(s, number, block, own))
		wrong("%s: queue %u: message %u has lost its properties", when, q, number);
	if ((seal && s->ledger->sealed[number] == UNSEALED) ||
	    (!seal && s->ledger->sealed[number] == SEALED))
		wrong("%s: queue %u: message %u is on disk with%s a seal", when, q, number,
		      seal ? "" : "out");
}

/* nsqd's records: length, timestamp, attempts, 16 hexadecimal digits, body. In place of the body:
 * 8 bytes of magic, u32 length of the properties, those, the body. */
static void see_records(const scene *s, finding *f, const char *when, uint32_t q, const uint8_t *at,
                        const uint8_t *end, bool in_turn)
{
	while (at < end) {
		uint64_t length = end - at < 30 ? 0 : big_endian(at, 4);
		char digits[17] = {0};
		const uint8_t *body = at + 30;
		uint64_t properties = 0, seal = 0;

		if (length < 27 || length > (uint64_t)(end - at) - 4)
			wrong("%s: queue %u: a record on disk has %llu bytes", when, q,
			      (unsigned long long)length);
		memcpy(digits, at + 14, 16);
		at += 4 + length;
		if (at - body > 12 && !memcmp(body, "\xf5shmqp\1\n", 8)) {
			properties = body[8] | (uint64_t)body[9] << 8;
			body += 12;
		}
		if (properties > (uint64_t)(at - body))
			wrong("%s: queue %u: a record has %llu bytes of properties", when, q,
			      (unsigned long long)properties);
		if (properties >= SEAL_ENTRY &&
		    !memcmp(body + properties - SEAL_ENTRY, "\x09shmq-seal\x10\0", SEAL_ENTRY - 16))
			seal = SEAL_ENTRY;
		found_record(s, f, when, q, body, properties, seal, (uint64_t)(at - body),
		             strtoull(digits, NULL, 16), in_turn);
	}
}

static void see_disk(const scene *s, finding *f, const char *when, uint32_t q)
{
	const shmq_queue_desc *desc = queue_of(s, q);
	const ledger *l = s->ledger;
	uint64_t read = desc->disk_read, write = desc->disk_write;

	if (read == write)
		return;
	if (q || write > sizeof(l->disk) || read > write)
		wrong("%s: queue %u: on disk from %llu to %llu", when, q, (unsigned long long)read,
		      (unsigned long long)write);
	see_records(s, f, when, q, l->disk + read, l->disk + write, true);
}

static void see_chunk(const scene *s, finding *f, const char *when, uint32_t q)
{
	const shmq_queue_desc *desc = queue_of(s, q);
	const ledger *l = s->ledger;
	uint64_t read = desc->deferred_read;
	uint32_t next = read >> SHMQ_CHUNK_SHIFT == 1 ? (uint32_t)(read & 0xffffff) : 0;
	const uint8_t *at = l->chunk;

	if (q || desc->deferred_write < 1 || desc->deferred_gone >= 1)
		return;
	for (uint32_t i = 0; i < l->chunk_count; at += l->chunk_lengths[i++])
		if (i >= next)
			see_records(s, f, when, q, at, at + l->chunk_lengths[i], false);
}

static void see_queue(const scene *s, finding *f, const char *when, uint32_t q)
{
	const shmq_slot_desc *slots = (const void *)((const uint8_t *)queue_of(s, q) +
	                                             queue_of(s, q)->slots_at);

	/* the order of delivery */
	see_state(s, f, when, q, SHMQ_REQUEUED, true);
	see_disk(s, f, when, q);
	see_state(s, f, when, q, SHMQ_READY, true);
	for (uint32_t i = 1; i < f->count; i++)
		if (f->number[i] < f->number[i - 1] && !s->operation->out_of_order && s->ledger->takers < 2)
			wrong("%s: queue %u: message %u comes behind %u", when, q, f->number[i],
			      f->number[i - 1]);
	for (uint32_t i = 0; i < f->count; i++)
		if (s->ledger->due[f->number[i]])
			wrong("%s: queue %u: message %u comes before its time", when, q, f->number[i]);
	/* and those that wait for something else */
	see_state(s, f, when, q, SHMQ_IN_FLIGHT, false);
	see_state(s, f, when, q, SHMQ_SPILLING, false);
	see_state(s, f, when, q, SHMQ_DEFERRED, false);
	see_state(s, f, when, q, SHMQ_LEASED, false);
	see_chunk(s, f, when, q);
	for (uint32_t i = 0; i < queue_of(s, q)->slots_committed; i++) {
		uint32_t properties = properties_of(&slots[i]);
		const uint8_t *body = (const uint8_t *)queue_of(s, q) + queue_of(s, q)->arena_at +
		                      slots[i].body + properties;
		int64_t due;

		if ((slots[i].word & 0xff) != SHMQ_DEFERRED)
			continue;
		due = s->ledger->due[body_number(body, slots[i].length - properties)];
		if (due && slots[i].deadline != due)
			wrong("%s: queue %u: message %u has lost its due time", when, q, body[0]);
	}
}

/* A message on its way from the backlog is there, or in both channels. */
static void see_moves(finding *f, const char *when)
{
	for (uint32_t i = 0; i < MESSAGES; i++) {
		if (f[1].seen[i] != f[2].seen[i] || (f[0].seen[i] && f[1].seen[i]))
			wrong("%s: message %u is half-way to the channels", when, i);
		if (f[1].seen[i]) {
			if (f[1].id[i] != f[2].id[i])
				wrong("%s: message %u has two ids", when, i);
			f[0].id[i] = f[1].id[i];
		}
		f[0].seen[i] |= f[1].seen[i];
	}
}

/* A message on its way to the dead topic, or back, is in one of the two. */
static void see_carries(const scene *s, finding *f, const char *when)
{
	for (uint32_t i = 0; i < MESSAGES; i++) {
		if (s->ledger->fate[0][i] == NEVER)
			continue;
		if (f[0].seen[i] && f[1].seen[i])
			wrong("%s: message %u is in both topics", when, i);
		if (f[1].seen[i])
			f[0].id[i] = f[1].id[i];
		f[0].seen[i] |= f[1].seen[i];
		f[1].seen[i] = 0;
	}
}

static void see_ids(const scene *s, const finding *f, uint32_t queues, const char *when)
{
	uint64_t id[MESSAGES] = {0};
	uint32_t last = MESSAGES;

	for (uint32_t i = 0; i < s->ledger->next; i++) {
		for (uint32_t q = 0; q < queues; q++) {
			if (!f[q].seen[i])
				continue;
			if (id[i] && id[i] != f[q].id[i])
				wrong("%s: queue %u: message %u has another id than elsewhere", when, q, i);
			id[i] = f[q].id[i];
		}
		if (!id[i])
			continue;
		if (last < MESSAGES && id[i] <= id[last])
			wrong("%s: message %u has no greater id than %u before it", when, i, last);
		last = i;
	}
}

void see_messages(const scene *s, const char *when)
{
	const ledger *l = s->ledger;
	finding f[QUEUES];
	uint32_t group[MESSAGES] = {0}, in[MESSAGES] = {0}, queues = l->moves ? 1 : l->queues;

	memset(f, 0, sizeof(f));
	for (uint32_t q = 0; q < l->queues; q++)
		if (queue_lives(s, q))
			see_queue(s, &f[q], when, q);
	if (l->moves)
		see_moves(f, when);
	if (l->carries)
		see_carries(s, f, when);
	for (uint32_t q = 0; q < queues; q++)
		for (uint32_t i = 0; i < l->next; i++) {
			enum fate fate = l->fate[q][i];
			bool seen = f[q].seen[i];

			group[l->batch[i]] += fate == GROUP;
			in[l->batch[i]] += fate == GROUP && seen;
			if (fate == DUE && !seen)
				wrong("%s: queue %u: message %u is lost", when, q, i);
			if ((fate == NEVER || fate == DONE) && seen)
				wrong("%s: queue %u: message %u %s", when, q, i,
				      fate == DONE ? "is back after its finish" : "comes from nowhere");
		}
	for (uint32_t i = 0; i < l->next; i++)
		if (in[i] && in[i] != group[i])
			wrong("%s: the interrupted publish of message %u is there %u times of %u", when, i,
			      in[i], group[i]);
	see_ids(s, f, queues, when);
}

static void see_lock(shmq_lock_desc *lock, const char *what, uint32_t number)
{
	int r = pthread_mutex_trylock(&lock->mutex);

	if (r)
		wrong("the %s lock (%u) cannot be taken: %s", what, number,
		      r == EOWNERDEAD        ? "nobody repaired it"
		      : r == EBUSY           ? "held"
		      : r == ENOTRECOVERABLE ? "not recoverable"
		                             : strerror(r));
	pthread_mutex_unlock(&lock->mutex);
}

void see_locks(const scene *s)
{
	see_lock(&directory_of(s)->registry, "registry", 0);
	for (uint32_t i = 0; i < directory_of(s)->topics_committed; i++)
		see_lock(&topics_of(s)[i].publish, "publish", i);
	for (uint32_t i = 0; i < directory_of(s)->queues_committed; i++)
		if (entries_of(s)[i].state == SHMQ_ENTRY_LIVE)
			see_lock(&((shmq_queue_desc *)(void *)s->files->map[entries_of(s)[i].serial])->deliver,
			         "deliver", i);
	for (uint32_t i = 0; i < directory_of(s)->clients_committed; i++)
		if (clients_of(s)[i].state == SHMQ_CLIENT_FREE)
			see_lock(&clients_of(s)[i].life, "life", i);
}

void see_empty(const scene *s)
{
	for (uint32_t q = 0; q < s->ledger->queues; q++) {
		const shmq_queue_desc *desc = queue_of(s, q);
		const shmq_slot_desc *slots = (const void *)((const uint8_t *)desc + desc->slots_at);

		for (uint32_t i = 0; queue_lives(s, q) && i < desc->slots_committed; i++)
			if ((slots[i].word & 0xff) != SHMQ_FREE)
				wrong("queue %u is drained, and slot %u has state %llu", q, i,
				      (unsigned long long)(slots[i].word & 0xff));
	}
}

/*
 * The types of the extension and what their files share. A method parses its arguments, makes one
 * core call and converts the result; it has no rules of its own.
 *
 * Methods. METHOD (arguments.h) writes the parsing of a method's arguments. The methods that are
 * called for every message parse theirs by hand.
 */
#ifndef SHMQ_BINDING_TYPES_H
#define SHMQ_BINDING_TYPES_H

#include "calls.h"

/* ---- types ---------------------------------------------------------------------------------- */

module_state *state_of(PyTypeObject *type); /* works for subclasses made in Python too */
PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
/* Raise RuntimeError if __init__ was called twice, or was not called. Returns false if so. */
bool init_first(bool called, const char *type);
bool init_called(bool called, const char *type);
void object_free(PyObject *self); /* end of a dealloc: free the memory, drop the type */
/* The value of a constant of the core, by its name without SHMQ_. */
uint32_t constant_of(const char *name);

/*
 * Methods of Broker that are one call of the core.
 *   NONE_METHOD    the call may fail; the method returns None
 *   COUNT_METHOD   it may fail, or stores `count` of this type; the method returns that
 *   TELL_METHOD    it neither waits nor fails
 * how: BROKER_CALL or BROKER_TRY. tried, `...`: the text for raise_status, and its arguments.
 */
#define NONE_METHOD(name, parameters, how, call, ...)                                              \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		int status_;                                                                               \
                                                                                                   \
		how(self, status_, call);                                                                  \
		if (status_ != SHMQ_OK)                                                                    \
			return raise_status(self->state, status_, NULL, __VA_ARGS__);                          \
		Py_RETURN_NONE;                                                                            \
	}
#define COUNT_METHOD(name, parameters, type, how, call, ...)                                       \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		type count = 0;                                                                            \
		int status_;                                                                               \
                                                                                                   \
		how(self, status_, call);                                                                  \
		if (status_ != SHMQ_OK)                                                                    \
			return raise_status(self->state, status_, NULL, __VA_ARGS__);                          \
		return PyLong_FromUnsignedLongLong(count);                                                 \
	}
#define TELL_METHOD(name, parameters, call, tried)                                                 \
	METHOD(broker, name, parameters, )                                                             \
	{                                                                                              \
		if (!broker_usable(self, tried))                                                           \
			return NULL;                                                                           \
		call;                                                                                      \
		Py_RETURN_NONE;                                                                            \
	}

/* The methods of Broker and Producer that are in other files; X(name) declares or lists one. */
/* clang-format off */
#define SUPERVISOR_METHODS(X) \
	X(set_data_path) X(disk_trouble) X(supervise) X(supervisor_wait) X(scan_at) X(spiller_request) \
	X(spiller_pending) X(names_written) X(stopping) X(close_directory) X(next_request) X(answer) \
	X(create_topic) X(reserve_queue) X(create_queue) X(enter_queue) X(take_over) X(renamed) \
	X(remove_queue) X(erase_queue) X(trim) X(remove_topic) X(expire) X(sweep) X(dead_waiting) X(dead_postpone) \
	X(stage_oldest) X(spill_begin) X(chunk_begin) \
	X(chunk_load) X(chunk_depth) X(restore) X(disk_adopt) X(disk_set) X(evict_read_ahead) X(pump) \
	X(adopt) X(rebuild) X(audit) X(reap_scan) X(reap_spare) X(reap)
#define LEASE_METHODS(X) \
	X(lease_holder_open) X(lease_holder_touch) X(lease_holder_adopt) X(lease_holder_close) \
	X(lease_holder_leave) \
	X(lease_take) X(lease_look) \
	X(lease_list) X(lease_finish) X(lease_return) X(lease_end) X(lease_wait) X(lease_open) \
	X(lease_read) X(lease_properties)
#define STORE_METHODS(X) \
	X(find_store) X(request_store) X(reserve_store) X(create_store) X(enter_store) X(remove_store)
#define PRODUCER_METHODS(X) \
	X(publish_fixed) X(publish_arrow) X(publish_arrow_stream) X(publish_once) X(mark)
#define WIRE_METHODS(X) X(publish_framed) X(publish_run)
#define X(name) FASTCALL_FUNCTION(broker_##name);
SUPERVISOR_METHODS(X) LEASE_METHODS(X) STORE_METHODS(X)
#undef X
#define X(name) FASTCALL_FUNCTION(producer_##name);
PRODUCER_METHODS(X) WIRE_METHODS(X)
#undef X
		/* clang-format on */

		typedef PyObject native_object; /* `self` of a function is the module */
FASTCALL_FUNCTION(native_scan_bodies);
FASTCALL_FUNCTION(native_reopen_store);

/* properties.c */
FASTCALL_FUNCTION(native_pack_properties);
FASTCALL_FUNCTION(native_unpack_properties);
FASTCALL_FUNCTION(native_record_properties);
FASTCALL_FUNCTION(native_split_body);
/* Two bytes objects for the offsets and the blocks of `count` messages' properties. Returns a tuple,
 * and where the core is to write. */
PyObject *blocks_new(uint32_t count, uint64_t size, shmq_blocks *to);
FASTCALL_FUNCTION(native_encode_slot);
/* Write a mapping, or None, as a block. Returns 0, or -1 with an exception. */
int properties_pack(module_state *state, PyObject *mapping, uint8_t block[SHMQ_PROPERTIES_MOST],
                    uint64_t *length);
/* Returns a read-only mapping of str to bytes. */
PyObject *properties_unpack(module_state *state, const void *block, uint64_t length);
typedef struct property_blocks {
	PyObject *keep;    /* the bytes that they point into */
	shmq_body *blocks; /* NULL: no message has properties */
} property_blocks;
/* packed: None, one block as bytes for all n messages, or a sequence of n. Returns 0, or -1 with an
 * exception. */
int property_blocks_open(property_blocks *self, PyObject *packed, Py_ssize_t n);
void property_blocks_close(property_blocks *self);

/* spill_type.c */
/* Make room for up to n messages, with due times if it is for a chunk. Returns false with
 * MemoryError. */
bool spill_room(shmq_spill *spill, uint32_t queue, uint32_t n, bool chunk);
void spill_room_free(shmq_spill *spill);
/* Takes over the room. */
PyObject *spill_new(broker_object *broker, shmq_spill *spill);

/* producer_type.c */
/* Publish, and wait up to `timeout` for room. large: copy the bodies without the GIL. Returns 0, or
 * -1 with an exception. */
int producer_put(producer_object *self, const shmq_body *bodies, uint32_t n, bool large,
                 const shmq_terms *terms, int64_t timeout, uint64_t *first_id);
/* The CLOCK_REALTIME ns at which a message is due that is deferred for `defer` ns; 0: at once. */
static inline int64_t due_after(int64_t defer)
{
	return defer ? later_by(shmq_realtime(), defer) : 0;
}

/* The terms of messages that are deferred for `defer` ns and live for `ttl` ns from then on; 0: for
 * ever. */
static inline shmq_terms terms_after(int64_t defer, int64_t ttl)
{
	shmq_terms terms = {.due = due_after(defer)};

	if (ttl)
		terms.expires = later_by(terms.due ? terms.due : shmq_realtime(), ttl);
	return terms;
}

#define BODIES_ON_STACK 256
/* Room for n bodies: `stack`, or memory for PyMem_Free. Returns NULL with MemoryError. */
shmq_body *bodies_new(shmq_body stack[BODIES_ON_STACK], Py_ssize_t n);
/* Returns true if one of them is to be copied without the GIL. */
bool bodies_large(const shmq_body *bodies, uint32_t n);
/* producer_methods.c */
/* Bodies in a buffer, and a second buffer to find them with: offsets, or a command line. */
typedef struct body_source {
	Py_buffer data, where;
	shmq_body *bodies, stack[BODIES_ON_STACK];
	uint32_t count;
} body_source;
/* Get the buffers; where: NULL if there is none. Returns 0, or -1 with an exception. */
int source_open(body_source *source, PyObject *data, PyObject *where);
/* Make room for bodies. Returns false with MemoryError. */
bool source_room(body_source *source, uint32_t count);
/* Publish source->count bodies if they are `good`, else an exception is set; then close the source.
 * Returns 0, or -1 with an exception. */
int source_publish(body_source *source, producer_object *producer, bool good,
                   const shmq_terms *terms, int64_t timeout, uint64_t *first_id);

/* wire_methods.c */
/* Find the bodies of the PUB commands at the start of the input, or of the MPUB there, whose line
 * is source->where: source->count of them. answers: the commands; used: their bytes. */
void wire_run(body_source *source, shmq_wire_input *in, uint64_t *used, uint32_t *answers);

/* loan_type.c */
/* block: its properties as bytes, or NULL; a reference that is taken over. */
PyObject *loan_new(producer_object *producer, uint64_t length, PyObject *block, int64_t defer,
                   int64_t timeout, bool zero);
/* consumer_type.c */
bool consumer_usable(consumer_object *self);
/* Tell whoever watches for messages that there was nothing to take. Returns 0, or -1 with an
 * exception. */
int beacon_tell(PyObject *beacon);
/* If an exception is set, the caller never learns of these messages, which were just taken: give
 * them back, as ones that have not failed. */
void consumer_untake(consumer_object *self, const shmq_message *messages, uint32_t n);

/* message_type.c */
#define BODY_COPIED 4096u /* longest body that is copied when the message is taken */
/* Returns NULL without an exception if the message was lost before its body was copied. */
PyObject *message_new(consumer_object *consumer, const shmq_message *m);
/* The message is no longer in flight to its consumer. */
void message_settled(message_object *self);

/* batch_type.c */
/* A Batch of n > 0 messages just taken. Returns NULL without an exception if all were lost. */
PyObject *batch_new(consumer_object *consumer, const shmq_message *messages, uint32_t n);
/* A Batch of no messages and no consumer. */
PyObject *batch_empty(PyTypeObject *type);
void batch_settled(batch_object *batch, uint32_t index);
/* The block of the offsets and bodies, for an empty batch too; borrowed. Returns NULL with an
 * exception. */
PyObject *batch_block(batch_object *batch);

/* batch_arrow.c */
FASTCALL_FUNCTION(batch___arrow_c_array__);
FASTCALL_FUNCTION(batch___arrow_c_stream__);
FASTCALL_FUNCTION(batch_import_arrow);

#define X(name) extern PyType_Spec name##_spec;
TYPES(X)
#undef X

/* Rows of tables; their names say which docstring they have. */
#define METHOD_ROW(owner, Class, name, flags)                                                      \
	{#name, (PyCFunction)(void (*)(void))owner##_##name, flags, DOC_##Class##_##name}
#define FAST (METH_FASTCALL | METH_KEYWORDS)
#define TYPE_SPEC(owner, Class, more_flags)                                                        \
	PyType_Spec owner##_spec = {.name = "shmq._native." #Class,                                    \
	                            .basicsize = sizeof(owner##_object),                               \
	                            .flags = Py_TPFLAGS_DEFAULT | (more_flags),                        \
	                            .slots = owner##_slots}
#define GETTER_ROW(owner, Class, name)                                                             \
	{#name, (getter)(void (*)(void))owner##_##name, NULL, DOC_##Class##_##name, NULL}
#define MEMBER_ROW(owner, Class, name, type, field)                                                \
	{#name, type, offsetof(owner##_object, field), READONLY, DOC_##Class##_##name}

#endif

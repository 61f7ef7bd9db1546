/** Keeps conversations in this browser. Without a database, as in some private windows, they last as long as the page. */

/** @typedef {import("./conversation.js").Conversation} Conversation */

const DATABASE = "pagewire";
const STORE = "conversations";

/** @type {Promise<IDBDatabase | null> | undefined} */
let opened;

/** @returns {Promise<IDBDatabase | null>} */
function open() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
      request.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/**
 * Returns all conversations, the last changed first.
 *
 * @returns {Promise<Conversation[]>}
 */
export async function load() {
  const all = await run("readonly", (store) => store.getAll());
  return /** @type {Conversation[]} */ (all ?? []).sort((a, b) => b.changed - a.changed);
}

/**
 * @param {Conversation} conversation
 * @returns {Promise<boolean>} Whether it is kept.
 */
export async function save(conversation) {
  return (await run("readwrite", (store) => store.put(conversation))) !== undefined;
}

/** @param {string} id */
export async function remove(id) {
  await run("readwrite", (store) => store.delete(id));
}

/**
 * @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore) => IDBRequest} work
 * @returns {Promise<unknown>} undefined if there is no database, or no room.
 */
async function run(mode, work) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve) => {
    const request = work(database.transaction(STORE, mode).objectStore(STORE));
    request.onsuccess = () => resolve(request.result ?? null);
    request.onerror = () => resolve(undefined);
  });
}

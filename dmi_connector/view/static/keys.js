// Keyboard shortcuts.

/**
 * keys: {key: action}. inList: {key: action} while the list has the focus. always: keys that also work without a
 * capture. list: the element of the list. ready(): whether a capture is shown.
 */
export function listen({ keys, inList, always, list, ready }) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
    if (event.key === "Enter" && event.target.matches("button")) return;
    const act = (document.activeElement === list && inList[event.key]) || keys[event.key];
    if (!act || (!ready() && !always.includes(event.key) && act !== inList[event.key])) return;
    event.preventDefault();
    act();
  });
}

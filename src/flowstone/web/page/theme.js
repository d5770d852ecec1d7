// Sets the colours that were chosen before anything is painted: a classic script, in the head, for that reason.

(() => {
  try {
    const chosen = localStorage.getItem("flowstone.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // A browser that keeps nothing follows the system.
  }
})();

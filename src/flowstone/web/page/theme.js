// Applies the stored theme before the first paint; therefore a classic script in the head.

(() => {
  try {
    const chosen = localStorage.getItem("flowstone.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Without storage, use the system's theme.
  }
})();
